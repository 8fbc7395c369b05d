"""`longspan finetune`, `predict`, `embed` and `evaluate-tasks`."""

import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.transfer.batches import ExampleBatches
from longspan.transfer.tasks import KNOWN
from tests.transfer.conftest import sentences, write

from .conftest import Cli

STEPS = ["--set", "training.steps=2", "--set", "training.batch=4", "--device", "cpu"]


def test_finetune_predict_and_embed(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "moods" / "train.jsonl", sentences(20, 1))
    write(tmp_path / "moods" / "test.jsonl", sentences(4, 2))
    done = cli("finetune", model, "--task", "moods", "--out", "run", *STEPS, "--json")
    assert done.code == 0, done.err
    assert done.json["metric"] == "accuracy"
    assert 0 <= done.json["dev"] <= 1
    assert 0 <= done.json["test"] <= 1
    again = cli("finetune", model, "--task", "moods", "--out", "run", *STEPS, "--json")
    again.refused("already contains a run", "--resume auto")
    resumed = cli("finetune", model, "--task", "moods", "--out", "run", *STEPS, "--resume", "auto", "--json")
    assert resumed.json == done.json
    lines = cli("predict", "run", "-t", "a fine film", "-t", "a dull film").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert [set(one["probabilities"]) for one in found] == [{"bad", "good"}] * 2
    assert abs(sum(found[0]["probabilities"].values()) - 1) < 1e-6
    assert len(cli("predict", "run", "--data", "moods/test.jsonl").out.splitlines()) == 4
    assert "capturing" not in done.err
    assert re.search(r"^step 1  loss \d\.\d{4}$", done.err, re.MULTILINE)  # in nats: errors of similarity have no bits
    card = Path("run/best/README.md").read_text()
    assert "longspan predict" in card
    assert "longspan eval" not in card
    for rows in ('{"text": "a fine film", "label": [1, 2]}\n', "text,more\na fine film,x\n"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(rows.encode())))
        again = json.loads(cli("predict", "run", "--data", "-").out)
        assert again["probabilities"] == pytest.approx(found[0]["probabilities"], rel=1e-5)
    assert cli("embed", model, "-t", "one", "--out", "f.npy").out == "f.npy: 1 text, 32 features\n"
    assert cli("embed", model, "-t", "one", "-t", "three", "--layer", "1", "--out", "f.npy").code == 0
    assert np.load("f.npy").shape == (2, 32)
    # A fine-tuned model is still a language model.
    assert cli("eval", "run", "--data", "moods/test.jsonl", "--json").code == 0


def test_known_tasks_are_listed_and_installed_ones_marked(cli: Cli, tmp_path: Path) -> None:
    known = cli("data", "list", "--json").json["tasks"]
    assert {row["name"] for row in known} == set(KNOWN)
    assert not any(row["installed"] for row in known)
    (tmp_path / "cache" / "tasks" / "sst2").mkdir(parents=True)
    assert [row["name"] for row in cli("data", "list", "--json").json["tasks"] if row["installed"]] == ["sst2"]
    _, tasks = cli("data", "list").out.split("\ntasks:\n")
    lines = {line[2:].split()[0]: line for line in tasks.split("\n\n")[0].splitlines()}
    assert set(lines) == set(KNOWN)
    assert [name for name, line in lines.items() if line.startswith("*")] == ["sst2"]


def test_ctrl_c_saves_the_run_and_says_how_to_continue(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "moods" / "train.jsonl", sentences(20, 1))
    command = ["finetune", model, "--task", "moods", "--out", "run", *STEPS, "--json"]
    following = ExampleBatches.next

    def interrupted(self: ExampleBatches, *given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return following(self, *given)

    monkeypatch.setattr(ExampleBatches, "next", interrupted)
    stopped = cli(*command)
    assert (stopped.code, stopped.out) == (130, "")
    last = stopped.err.splitlines()[-1]
    assert all(word in last for word in ("SIGINT", "step 1", "run", "--resume auto"))
    monkeypatch.setattr(ExampleBatches, "next", following)
    assert cli(*command, "--resume", "auto").code == 0


def test_errors_are_one_sentence(cli: Cli, model: Path, tmp_path: Path) -> None:
    cli("finetune", model, "--task", "sst3", "--out", "run").refused("sst3", "sst2")
    cli("finetune", model, "--task", "sst2", "--out", "run").refused("sst2", "--from")
    cli("finetune", model, "--task", "blimp", "--out", "run").refused("blimp", "evaluate-tasks")
    cli("predict", model, "-t", "a").refused("finetune")
    cli("predict", model).refused("m")
    cli("embed", model, "--out", "f.npy").refused("--text")
    cli("embed", model, "--data", "missing.jsonl", "--out", "f.txt").refused("f.txt", ".npy")
    cli("embed", model, "-t", "a", "--layer", "9", "--out", "f.npy").refused("9")
    cli("evaluate-tasks", model, "--tasks", "glue").refused("glue")
    cli("evaluate-tasks", model, "--tasks", "copa, lambada").refused("copa", "--from")
    cli("evaluate-tasks", model, "--tasks", " ,").refused("--tasks")
    cli("data", "get", "sst3").refused("sst3", "sst2")
    cli("data", "get", "zzzzzz").refused("imdb", "enwik8")
    cli("data", "get", "sst2", "--from", tmp_path).refused("sst2.tar.xz")
