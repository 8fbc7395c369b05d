"""Reliability: runs that torchrun starts, with processes that are killed, restarted or started twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longspan.checkpoints.model_folder import load_model
from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.folder import locked
from longspan.training.observers.metrics import read_lines
from longspan.training.processes import Processes
from tests.training.conftest import run_in_process
from tests.training.processes import on_processes, tensors

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
SEED = int(os.environ.get("LONGSPAN_SEED", "1"))
PROCESSES, KILLS, STEPS = (4, 50, 400) if TORTURE else (2, 1, 30)
REPOSITORY = Path(__file__).parents[2]
RECIPE = """
[model]
family = "transformer-xl"
layers = 2
width = 16
heads = 2
inner = 24
dropout = 0.2
[training]
batch = 4
segment = 8
memory = 12
lr = 0.01
save_every = 2
"""


def torchrun(folder: Path, out: str, *more: str, restarts: int = 0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    command += [f"--max-restarts={restarts}", "-m", "longspan", "train", "--out", str(folder / out), *more]
    flags = ["--recipe", str(folder / "small.toml"), "--data", str(folder / "text"), "--threads", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR"}
    log = (folder / f"{out}.log").open("a")
    steps = ["--set", f"training.steps={STEPS}"]
    return subprocess.Popen(
        [*command, *flags, *steps], cwd=REPOSITORY, env=environment, stdout=log, stderr=log, text=True
    )


def undisturbed(folder: str) -> None:
    """The same run without torchrun and kills."""

    def work(_: Processes) -> None:
        recipe = run.resolve(Path(folder, "small.toml"), [f"training.steps={STEPS}"], data=str(Path(folder, "text")))
        run.train(recipe, Path(folder, "undisturbed"))

    assert on_processes(PROCESSES, work) == [0] * PROCESSES


def workers(launcher: "subprocess.Popen[str]") -> list[int]:
    try:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in children]


def lines(folder: Path, out: str) -> list[str]:
    """What longspan itself printed as an error."""
    return [line for line in (folder / f"{out}.log").read_text().splitlines() if line.startswith("longspan:")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(RECIPE)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/one.txt").write_text("the quick brown fox jumps over a lazy dog.\n" * 60)
    return tmp_path


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_the_result_is_the_same(folder: Path) -> None:
    rng = random.Random(SEED)
    assert run_in_process(undisturbed, str(folder), timeout=600) == 0
    disturbed, killed = torchrun(folder, "killed", restarts=KILLS), 0
    while killed < KILLS:
        rows, deadline = len(read_lines(folder / "killed/metrics.jsonl")), time.monotonic() + 120
        while len(read_lines(folder / "killed/metrics.jsonl")) <= rows:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="another process is training"), locked(folder / "killed"):
            pass
        time.sleep(rng.random() * 2 if TORTURE else 0)
        found = workers(disturbed)
        if not found:
            break
        os.kill(rng.choice(found), signal.SIGKILL)
        killed += 1
    assert disturbed.wait(600) == 0
    assert killed == KILLS, "the run ended before all kills"
    expected, found_rows = (read_lines(folder / out / "metrics.jsonl") for out in ("undisturbed", "killed"))
    assert [row["step"] for row in found_rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in found_rows] == [row["loss"] for row in expected]
    last = [tensors(folder / out / f"checkpoint-{STEPS}") for out in ("undisturbed", "killed")]
    for name, tensor in last[0].items():
        assert torch.equal(tensor, last[1][name]), name
    assert json.loads((folder / "killed/run.json").read_text())["processes"][0]["ranks"] == PROCESSES
    assert load_model(folder / "killed").model.parameter_count > 0
    log = (folder / "killed.log").read_text()
    assert log.count("finished after step") == 1, "only the first process prints"
    assert log.count("reading ") <= 1 + KILLS


@pytest.mark.torture
def test_without_restarts_the_others_end_with_one_sentence(folder: Path) -> None:
    launcher = torchrun(folder, "lost", "--set", "training.seconds=300")
    deadline = time.monotonic() + 120
    while not read_lines(folder / "lost/metrics.jsonl"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(workers(launcher)[-1], signal.SIGKILL)
    start = time.monotonic()
    assert launcher.wait(60) != 0
    assert time.monotonic() - start < 60
    assert len(lines(folder, "lost")) <= 1
