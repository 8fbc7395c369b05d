"""benchmarks/make_bundled_model.py on a run of a few steps and nine very short novels."""

import contextlib
import importlib
import io
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
    monkeypatch.setattr("sys.argv", ["longspan", "train", "--recipe", "/some/novels.toml", "--out", "/at/home/run"])
    novels = tmp_path / "cache" / "corpora" / "english-novels"
    novels.mkdir(parents=True)
    for k in range(9):
        (novels / f"Author_Book_{k}.txt").write_bytes(b"\xef\xbb\xbfIt was the year %d.\r\nThe sun rose.\r\n" % k * 40)
    keys = [f"model.{key}" for key in ("layers=1", "width=16", "heads=2", "inner=16")]
    keys += [f"training.{key}" for key in ("segment=32", "memory=300", "batch=2", "seconds=60", "steps=5")]
    sets = [part for key in keys for part in ("--set", key)]
    flags = ["--recipe", str(ROOT / "recipes" / "novels.toml"), "--out", str(tmp_path / "run"), "--device", "cpu"]
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
    assert {row.memory for row in bundled_rows(card) if row.text == "passage"} == {model.reading.memory}
    assert "longspan train --recipe novels --out RUN" in card
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
    about.write_text(about.read_text().replace('"english-novels"', '"stdlib"'))
    with pytest.raises(SystemExit):
        generator().main([str(trained), "--commit", "c" * 40])
    error = capsys.readouterr().err
    assert "stdlib" in error
    assert "english-novels" in error
