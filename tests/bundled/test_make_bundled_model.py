"""benchmarks/make_bundled_model.py on a run of a few steps and nine very short novels."""

import contextlib
import importlib
import io
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import longspan
from longspan.cli.main import run

from .cards import ROOT, BundledRow, bits_by_memory, bundled_rows


def generator() -> ModuleType:
    return importlib.import_module("make_bundled_model")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on small files in the place of the novels, in a cache of its own."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    command = "longspan train --recipe /some/novels-and-books.toml --out /at/home/run"
    monkeypatch.setattr("sys.argv", command.split())
    for name in ("english-novels", "gutenberg-books"):
        folder = tmp_path / "cache" / "corpora" / name
        folder.mkdir(parents=True)
        for k in range(9):
            text = b"\xef\xbb\xbfIt was the year %d.\r\nThe sun rose.\r\n" % k * 40
            (folder / f"Author_Book_{k}.txt").write_bytes(text)
    keys = [f"model.{key}" for key in ("layers=1", "width=16", "heads=2", "inner=16")]
    keys += [f"training.{key}" for key in ("segment=32", "memory=300", "batch=2", "seconds=60", "steps=5")]
    sets = [part for key in keys for part in ("--set", key)]
    recipe = str(ROOT / "recipes" / "novels-and-books.toml")
    flags = ["--recipe", recipe, "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert run(["train", *flags, *sets]) == 0
    return tmp_path / "run"


def printed(row: BundledRow, model: Path) -> float:
    """The result that a command of the card prints, for a model that is not the bundled one."""
    words = shlex.split(row.command)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if words[0] == "python":
            exec(words[2].replace("longspan.load(", f"longspan.load({str(model)!r}, "), {})
            return float(out.getvalue())
        assert run([words[1], str(model), *words[2:]]) == 0
    (line,) = (line for line in out.getvalue().splitlines() if line.startswith("bits_per_byte"))
    return float(line.split()[1])


def test_every_command_of_the_card_prints_its_result(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundled"
    assert run(["export", str(trained), str(folder)]) == 0  # an older bundled model, which is replaced
    make = generator()
    monkeypatch.setattr(make, "MEMORIES", (256, 512, 2048))
    make.main([str(trained), "--out", str(folder), "--device", "cpu", "--commit", "c" * 40])
    card = (folder / "README.md").read_text()
    assert [(row.text, row.memory, row.clamp) for row in bundled_rows(card) if row.text == "valid"] == [
        ("valid", 256, 0),
        *(("valid", memory, clamp) for memory in (512, 2048) for clamp in (0, 331)),
    ]
    assert list(bits_by_memory(card, "test", 0)) == [256, 512, 2048]
    for row in bundled_rows(card):
        assert printed(row, folder) == pytest.approx(row.bits, abs=1e-4), row
    model = longspan.load(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "int8"
    (unrounded,) = re.findall(r"run have (\d\.\d{4}) bits", card)
    assert float(unrounded) == pytest.approx(bits_by_memory(card, "test", 0)[model.reading.memory], abs=0.05)
    assert "commit " + "c" * 40 + ", torch" in card
    assert {row.memory for row in bundled_rows(card) if row.text == "passage"} == {model.reading.memory}
    monkeypatch.setattr("cards.evaluate", pytest.fail)  # a second call finds all scores
    make.main([str(trained), "--out", str(folder), "--device", "cpu", "--commit", "c" * 40])
    assert (folder / "README.md").read_text() == card
    assert "longspan train --recipe novels-and-books --out RUN" in card
    assert str(tmp_path) not in card
    assert "/some" not in card
    assert "/at/home" not in card


def test_an_unsuitable_run_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generator().main([str(trained), "--commit", "abc+"])
    error = capsys.readouterr().err
    assert "'abc+'" in error
    assert "--commit" in error
    about = trained / "run.json"
    about.write_text(about.read_text().replace('"novels-and-books"', '"stdlib"'))
    with pytest.raises(SystemExit):
        generator().main([str(trained), "--commit", "c" * 40])
    error = capsys.readouterr().err
    assert "stdlib" in error
    assert "novels-and-books" in error


def test_figures_and_samples_of_another_model(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = importlib.import_module("pin_bundled_model")
    short = "    longspan generate -p ab -n 9 --seed 1 > docs/samples/a.txt\n"
    monkeypatch.setattr(pins, "PAGE", tmp_path / "page.md")
    pins.PAGE.write_text(short)
    pinned = {"places": [0, 9], "prompt": "It", "generated": [{"temperature": 0.8}], "losses": [{"settings": {}}]}
    (tmp_path / "pinned.json").write_text(json.dumps(pinned))
    flags = ["--model", trained, "--pinned", tmp_path / "pinned.json", "--samples", tmp_path / "samples"]
    pins.main([str(flag) for flag in flags])
    made, model = json.loads((tmp_path / "pinned.json").read_text()), longspan.load(trained, device="cpu")
    found = model.score((Path(__file__).with_name("passage.txt")).read_bytes(), method="stream")
    assert found.losses is not None
    assert made["losses"][0]["bits"] == pytest.approx(found.bits, abs=1e-6)
    assert made["losses"][0]["losses"] == pytest.approx([float(found.losses[k]) for k in (0, 9)], abs=1e-6)
    assert made["generated"][0]["text"] == model.generate("It", 64, temperature=0.8, seed=3)
    assert (tmp_path / "samples" / "a.txt").read_text() == "ab" + model.generate("ab", 9, seed=1) + "\n"
