"""The maker of the box on a model of a few steps and nine novels of a few lines: its card, command by command."""

import contextlib
import importlib
import io
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import longspan
from longspan.cli.main import run

from .card import Row, of, rows

ROOT = Path(__file__).resolve().parents[2]


def maker() -> ModuleType:
    return importlib.import_module("make_box")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on novels that are none, in a cache of its own."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["longspan", "train", "--recipe", "/some/novels-box.toml", "--out", "/at/home/run"])
    novels = tmp_path / "cache" / "corpora" / "english-novels"
    novels.mkdir(parents=True)
    for k in range(9):
        (novels / f"Author_Book_{k}.txt").write_bytes(b"\xef\xbb\xbfIt was the year %d.\r\nThe sun rose.\r\n" % k * 40)
    small = ["layers=1", "width=16", "heads=2", "inner=16", "segment=32", "memory=300"]
    keys = [f"model.{key}" for key in small] + ["training.batch=2", "training.seconds=60", "training.steps=5"]
    sets = [part for key in keys for part in ("--set", key)]
    flags = ["--recipe", str(ROOT / "recipes" / "novels-box.toml"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert run(["train", *flags, *sets]) == 0
    return tmp_path / "run"


def typed(row: Row, model: Path) -> float:
    """What a command of the card prints, the model named because it is not in the box."""
    words = shlex.split(row.command)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if words[0] == "python":
            exec(words[2].replace("longspan.load(", f"longspan.load({str(model)!r}, "), {})
            return float(out.getvalue())
        assert run([words[1], str(model), *words[2:]]) == 0
    (line,) = (line for line in out.getvalue().splitlines() if line.startswith("bits_per_byte"))
    return float(line.split()[1])


def test_every_command_of_the_card_prints_its_figure(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["export", str(trained), str(tmp_path / "box")]) == 0  # what was in the box before
    make_box = maker()
    monkeypatch.setattr(make_box, "MEMORIES", (256, 512, 2048))
    make_box.main([str(trained), "--out", str(tmp_path / "box"), "--device", "cpu", "--commit", "c" * 40])
    card = (tmp_path / "box" / "README.md").read_text()
    assert [(row.text, row.memory, row.clamp) for row in rows(card) if row.text == "valid"] == [
        ("valid", 256, 0),
        *(("valid", memory, clamp) for memory in (512, 2048) for clamp in (0, 331)),
    ]
    assert list(of(card, "test", 0)) == [256, 512, 2048]
    for row in rows(card):
        assert typed(row, tmp_path / "box") == pytest.approx(row.bits, abs=1e-4), row
    model = longspan.load(tmp_path / "box")
    assert {row.memory for row in rows(card) if row.text == "passage"} == {model.config.memory}
    assert "longspan train --recipe novels-box --out RUN" in card
    assert str(tmp_path) not in card
    assert "/some" not in card
    assert "/at/home" not in card


def test_what_is_no_such_run_is_told(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        maker().main([str(trained), "--commit", "abc+"])
    assert "names abc+ as the commit" in capsys.readouterr().err
    about = trained / "run.json"
    about.write_text(about.read_text().replace('"english-novels"', '"stdlib"'))
    with pytest.raises(SystemExit):
        maker().main([str(trained), "--commit", "c" * 40])
    assert "trained on stdlib" in capsys.readouterr().err
