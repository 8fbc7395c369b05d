"""Reliability: runs that torchrun starts, with processes that are killed, restarted or started twice."""

import json
import os
import random
import signal
import subprocess
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
from tests.training.torchrun import (
    errors,
    free_port,
    node_flags,
    start,
    wait_for_restart,
    wait_for_rows,
    workers,
    write_inputs,
)

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
SEED = int(os.environ.get("LONGSPAN_SEED", "1"))
PROCESSES, KILLS, STEPS = (4, 50, 400) if TORTURE else (2, 1, 30)


def torchrun(folder: Path, out: str, *more: str, restarts: int = 0) -> "list[subprocess.Popen[str]]":
    """One node in `make torture`, else two nodes, each with its own working directory and cache."""
    train = ["--recipe", str(folder / "small.toml"), "--data", str(folder / "text"), "--out", str(folder / out)]
    train, log = [*train, *more, "--set", f"training.steps={STEPS}"], folder / f"{out}.log"
    if TORTURE:
        return [start(["--standalone", f"--nproc-per-node={PROCESSES}", f"--max-restarts={restarts}"], train, log)]
    launch, launchers = node_flags(free_port(), restarts), []
    for node in range(PROCESSES):
        (place := folder / f"node{node}").mkdir()
        launchers.append(start(launch, train, log, place, LONGSPAN_CACHE=str(place / "cache")))
    return launchers


def undisturbed(folder: str) -> None:
    """The same run without torchrun and kills."""

    def work(_: Processes) -> None:
        recipe = run.resolve(Path(folder, "small.toml"), [f"training.steps={STEPS}"], data=str(Path(folder, "text")))
        run.train(recipe, Path(folder, "undisturbed"))

    assert on_processes(PROCESSES, work) == [0] * PROCESSES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.torture
def test_a_killed_process_is_restarted_and_the_result_is_the_same(folder: Path) -> None:
    rng = random.Random(SEED)
    assert run_in_process(undisturbed, str(folder), timeout=600) == 0
    disturbed, killed = torchrun(folder, "killed", restarts=KILLS), 0
    while killed < KILLS:
        wait_for_rows(folder / "killed", len(read_lines(folder / "killed/metrics.jsonl")))
        with pytest.raises(ConfigError, match="another process is training"), locked(folder / "killed"):
            pass
        time.sleep(rng.random() * 2 if TORTURE else 0)
        found = [worker for launcher in disturbed for worker in workers(launcher)]
        if not found:
            break
        os.kill(rng.choice(found), signal.SIGKILL)
        wait_for_restart(disturbed, found)
        killed += 1
    assert [launcher.wait(600) for launcher in disturbed] == [0] * len(disturbed)
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
    assert log.count("failed (exitcode: -9)") == KILLS, "torchrun reports each kill"
    assert log.count("reading ") <= 1 + KILLS


@pytest.mark.torture
def test_without_restarts_the_others_end_with_one_sentence(folder: Path) -> None:
    launchers = torchrun(folder, "lost", "--set", "training.seconds=300")
    wait_for_rows(folder / "lost", 0)
    os.kill(workers(launchers[-1])[-1], signal.SIGKILL)
    started = time.monotonic()
    assert all(launcher.wait(60) for launcher in launchers)
    assert time.monotonic() - started < 60
    assert len(errors(folder / "lost.log")) <= 1
