"""The facts of a run that outlive its weights."""

import importlib
import json
from pathlib import Path

import pytest

from longspan.experiments.run_facts import facts_of_runs, portable_command, run_facts
from tests.experiments.scaling.test_study import run_folder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_facts_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run_folder(run, seed=7)
    start = {
        "command": ["longspan", "train", "--out", "/disk/a"],
        "device": "H200",
        "torch": "2.11",
        "commit": "c" * 40,
    }
    data = {"name": "/disk/text.txt", "split": "train", "tokens": 5000, "fingerprint": "f"}
    about = {"data": data, "processes": [start | {"time": "then"}, start | {"device": "another"}]}
    (run / "run.json").write_text(json.dumps(about))
    rows = [(9, 500, 30.0, [1.5], False), (10, 1000, 20.0, [2.5], True), (11, 1500, 40.0, [2.0], False)]
    names = ("step", "tokens", "tokens_per_second", "memory_gib", "skipped")
    lines = [dict(zip(names, row, strict=True)) | {"bits": 3.0, "seconds": 60.5} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = run_facts(run)
    assert (facts["seed"], facts["steps"], facts["tokens"], facts["seconds"]) == (7, 11, 1500, 60.5)
    assert (facts["tokens_per_second"], facts["peak_gib"], facts["skipped_steps"]) == (30.0, 2.5, 1)
    assert facts["data"] == data | {"name": "text.txt"}
    assert (facts["command"], facts["starts"], facts["time"]) == ("longspan train --out RUN", 2, "then")
    assert (facts["device"], facts["commit"]) == ("another", "c" * 40)
    assert facts["validation"]["bits"] == 2.5
    assert "/disk" not in json.dumps(facts)
    assert facts_of_runs([tmp_path / "runs", tmp_path / "points.csv"]) == {"a": facts}


def test_a_run_without_files_has_empty_facts(tmp_path: Path) -> None:
    run_folder(tmp_path / "a")
    for name in ("metrics.jsonl", "validation.jsonl"):
        (tmp_path / "a" / name).unlink()
    facts = run_facts(tmp_path / "a")
    assert facts["parameters"] > facts["non_embedding"] > 0
    assert (facts["steps"], facts["tokens_per_second"], facts["peak_gib"], facts["command"]) == (0, None, None, "")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("longspan train --recipe /a/b/tiny.toml --out /c --resume auto", "longspan train --recipe tiny --out RUN"),
        ("longspan train --resume /c/run --set training.lr=1", "longspan train --resume RUN --set training.lr=1"),
        ("/x/benchmarks/some.py --out /y --data enwik8", "some.py --out RUN --data enwik8"),
    ],
)
def test_commands_without_the_paths_of_a_machine(line: str, shown: str) -> None:
    assert portable_command(line.split()) == shown


def test_only_shapes_that_are_not_trained_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    is_trained = importlib.import_module("scaling_runs").is_trained
    for steps in (10, 20):
        assert not is_trained(tmp_path, [10, 20])
        (tmp_path / f"steps-{steps}" / f"checkpoint-{steps}").mkdir(parents=True)
        (tmp_path / f"steps-{steps}" / f"checkpoint-{steps}" / "manifest.json").touch()
    assert is_trained(tmp_path, [10, 20])
