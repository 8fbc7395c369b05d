"""Several nodes: a torchrun for each, with its own working directory, text and cache. They share the run's folder."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from longspan.training import run
from longspan.training.launch import agree_on_round, remember_start, started_before
from longspan.training.observers.metrics import read_lines
from tests.training.conftest import losses
from tests.training.torchrun import (
    RECIPE,
    errors,
    free_port,
    kill_node,
    node_flags,
    start,
    wait_for_port,
    wait_for_restart,
    wait_for_rows,
    workers,
    write_inputs,
)


class Nodes:
    """Two nodes that train in the folder `shared`."""

    def __init__(self, folder: Path, recipe: str = RECIPE) -> None:
        self.folder, self.out, self.port = folder, folder / "shared", free_port()
        for node in (0, 1):
            write_inputs(folder / f"node{node}", recipe)

    def log(self, node: int) -> Path:
        return self.folder / f"node{node}.log"

    def start(self, node: int, *flags: str, restarts: int = 0, **environment: str) -> "subprocess.Popen[str]":
        train = ["--recipe", "small.toml", "--data", "text", "--out", str(self.out), *flags]
        environment["LONGSPAN_CACHE"] = str(self.folder / f"cache{node}")
        place = self.folder / f"node{node}"
        return start(node_flags(self.port, restarts), train, self.log(node), place, **environment)

    def start_both(self, *flags: str, **options: Any) -> "list[subprocess.Popen[str]]":
        """Start the first node first, so that it has the store of the rendezvous."""
        first = self.start(0, *flags, **options)
        wait_for_port(self.port)
        return [first, self.start(1, *flags, **options)]

    def train_alone(self, out: Path, steps: int) -> None:
        """The same run in one process."""
        recipe, text = self.folder / "node0/small.toml", self.folder / "node0/text"
        run.train(run.resolve(recipe, [f"training.steps={steps}"], data=str(text)), out, resume="auto", observers=None)


@pytest.mark.torture
def test_two_nodes_continue_a_run_of_one_process_and_the_other_way_round(tmp_path: Path) -> None:
    two = Nodes(tmp_path, RECIPE + 'precision = "float64"\nschedule = "constant"\nvalidate_every = 10\n')
    two.train_alone(tmp_path / "alone", 28)
    two.train_alone(two.out, 4)
    launchers = two.start_both("--resume", "auto", "--set", "training.steps=24")
    assert [launcher.wait(120) for launcher in launchers] == [0, 0]
    two.train_alone(two.out, 28)
    assert np.abs(np.subtract(losses(two.out), losses(tmp_path / "alone"))).max() < 1e-10
    assert sorted(len(two.log(node).read_text()) > 0 for node in (0, 1)) == [False, True], "one process prints"
    written = {path.name for path in tmp_path.glob("node*/*")}
    assert written == {"small.toml", "text"}, "nothing is written outside of the run's folder and the caches"
    assert all(any((tmp_path / f"cache{node}").iterdir()) for node in (0, 1))


def test_a_round_has_a_number_of_its_own_although_restart_counts_differ() -> None:
    store = dist.HashStore()
    store.add("rounds", 1)  # the first round, in which process 1 asked twice and the others were killed before
    assert store.add("asked/1", 2) == 2
    store.set("answer/1/2", "1")

    def one_round() -> set[int]:
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda rank=rank: found.append(agree_on_round(store, rank, 3))) for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == 3
        return set(found)

    assert [one_round(), one_round()] == [{2}, {3}]


def test_only_a_run_that_this_launch_has_started_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not started_before(store, tmp_path, 1), "the folder was refused before the restart"
    remember_start(store, tmp_path)
    assert started_before(store, tmp_path, 0), "torchrun does not count the restart of a node that another one caused"
    assert not started_before(store, tmp_path / "other", 1)
    assert started_before(None, tmp_path, 1)
    assert not started_before(None, tmp_path, 0)


@pytest.mark.torture
@pytest.mark.parametrize("victim", [0, 1])
def test_without_restarts_the_other_node_ends(tmp_path: Path, victim: int) -> None:
    two = Nodes(tmp_path)
    launchers = two.start_both("--set", "training.seconds=300")
    wait_for_rows(two.out, 4)
    kill_node(launchers[victim])
    started = time.monotonic()
    assert launchers[1 - victim].wait(60) != 0
    assert time.monotonic() - started < 60
    assert len(errors(two.log(1 - victim))) <= 1


@pytest.mark.torture
@pytest.mark.parametrize("shared_store", ["shared", "unshared"])
def test_with_restarts_the_run_continues_and_equals_an_undisturbed_one(tmp_path: Path, shared_store: str) -> None:
    """A killed process on each node. A node that comes back needs a new store: the torchrun that stayed does not tell
    it the address of the old one (torch 2.13)."""
    two, steps = Nodes(tmp_path), 60
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(shared_store == "unshared"))}
    two.train_alone(tmp_path / "alone", steps)
    flags = ["--set", f"training.steps={steps}"]
    launchers = two.start_both(*flags, restarts=9, **environment)
    for node in (1, 0, 1):
        wait_for_rows(two.out, len(read_lines(two.out / "metrics.jsonl")) + 3)
        before = [worker for launcher in launchers for worker in workers(launcher)]
        os.kill(workers(launchers[node])[0], signal.SIGKILL)
        wait_for_restart(launchers, before)
    if shared_store == "unshared":
        wait_for_rows(two.out, len(read_lines(two.out / "metrics.jsonl")) + 3)
        kill_node(launchers[1])
        launchers[1] = two.start(1, *flags, restarts=9, **environment)
    assert [launcher.wait(300) for launcher in launchers] == [0, 0]
    assert np.abs(np.subtract(losses(two.out), losses(tmp_path / "alone"))).max() < 1e-5
