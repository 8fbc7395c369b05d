"""benchmarks/when_memory_pays.py on runs of a few steps."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.main import run
from longspan.data import open_corpus
from longspan.experiments import budget_curves

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "model.inner=16", "training.batch=2"]
SMALL += ["training.segment=16", "training.warmup=1", "training.validate_tokens=100"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of two budgets with memory and without, and a text."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(b"It was the year one, and the sun rose.\n" * 60)
    for memory in (16, 0):
        sets = [word for key in (*SMALL, f"training.memory={memory}") for word in ("--set", key)]
        words = ["train", "--recipe", "tiny", "--data", "text.txt", "--budgets", "4,8", "--out", f"memory-{memory}"]
        monkeypatch.setattr(sys, "argv", ["longspan", *words])
        assert run([*words, "--device", "cpu", *sets]) == 0
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    words = [*options, "--out", "figures", "--tokens", "60", "--check-tokens", "40", "--stride", "4"]
    words += ["--memories", "0,16", "--long", "64", "--streams", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["/some/folder/when_memory_pays.py", *words])
    assert importlib.import_module("when_memory_pays").main() == 0
    return dict(json.loads(Path("figures/budgets.json").read_text()))


def test_scores_figures_and_a_second_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["memory-16", "memory-0", "--data", "text.txt"]
    taken, scored = budget_curves.score, []

    def stop(*args: Any, **more: Any) -> Any:
        if len(scored) == 5:
            raise KeyboardInterrupt
        scored.append(more)
        return taken(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(budget_curves, "score", stop)
        with pytest.raises(SystemExit, match="continues"):
            call(monkeypatch, *options)
    assert len(json.loads(Path("figures/scores.json").read_text())) == 5
    rows = json.loads(Path("figures/budgets.json").read_text())["rows"]
    assert [one["run"] for one in rows] == ["steps-4"]  # what was finished is there
    found = call(monkeypatch, *options)
    ways = {(one["curve"], one["steps"]): [score["way"] for score in one["scores"]] for one in found["rows"]}
    assert ways["memory-16", 4] == ["segments", "memory"]
    assert ways["memory-0", 4] == ["segments", "window"]
    assert sorted(ways["memory-0", 8]) == ["memory"] * 3 + [
        "segments",
        "window",
    ]  # 16; 64 with the discount and without
    assert {one["scored"] for row in found["rows"] for one in row["scores"]} == {59}
    checked = found["rows"][-1]["check"]
    assert [(one["way"], one["stride"], one["scored"]) for one in checked[:2]] == [("window", 1, 39), ("window", 4, 39)]
    facts = found["rows"][0]["run_facts"]
    assert (facts["seed"], facts["steps"], facts["data"]["name"]) == (1111, 4, "text.txt")
    assert facts["command"].startswith("longspan train --recipe tiny --data text.txt --budgets 4,8 --out RUN")
    assert found["command"].startswith("when_memory_pays.py memory-16 memory-0 --data text.txt --out RUN")
    # The window of a run without memory equals a window of `eval`.
    (window,) = (one["bits"] for one in found["rows"][2]["scores"] if one["way"] == "window")
    model = budget_curves.load_model(Path("memory-0/steps-4")).model
    text = open_corpus("text.txt", "valid").excerpt(0, 60)
    assert window == pytest.approx(taken(model, text, model.reading, method="sliding", stride=4).bits, rel=1e-6)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was scored before")

    monkeypatch.setattr(budget_curves, "score", refuse)
    assert call(monkeypatch, *options)["rows"] == found["rows"]
    for name in ("budgets", "memories"):
        Path(f"figures/{name}.svg").unlink()
    call(monkeypatch, "--from", "figures/budgets.json")
    assert Path("figures/budgets.svg").is_file()
    assert Path("figures/memories.svg").is_file()


def test_wrong_use_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    row = {"curve": "a", "steps": 1, "tokens": 1, "seconds": 1.0, "trained_memory": 8, "scores": []}
    empty = {"data": "text.txt", "split": "valid", "tokens": 60, "unit": "byte", "rows": [row], "pairs": []}
    for name, content in (("other", '{"a": 1}'), ("list", "[]"), ("text", "text"), ("empty", json.dumps(empty))):
        Path(f"{name}.json").write_text(content)
    files = [["--from", f"{name}.json"] for name in ("none", "other", "list", "text", "empty")]
    lengths = [["runs", "--data", "text.txt", *words] for words in (["--memories", "abc"], ["--memories", "-1"])]
    lengths += [
        ["runs", "--data", "text.txt", *words] for words in (["--long", "1.5"], ["--memories", "", "--long", ""])
    ]
    for words in (*files, *lengths):
        monkeypatch.setattr(sys, "argv", ["when_memory_pays.py", *words, "--out", "figures"])
        with pytest.raises(SystemExit) as end:
            importlib.import_module("when_memory_pays").main()
        assert (end.value.code, next(word for word in words[::-1] if word) in capsys.readouterr().err) == (2, True)
    assert not Path("figures").exists()
