"""Test 1 of reliability: SIGKILL at random instants, many of them inside a save; no run is lost, not a bit differs.

Each trial is forked from a process that has torch imported and has not computed yet.
"""

import importlib
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.checkpoints import store
from tests.training.conftest import aside, content, losses, make_recipe, make_text, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
KILLS, IN_SAVES = (500, 100) if TORTURE else (6, 3)
STEPS = 12


def fork(work: Callable[[int], object]) -> tuple[int, int]:
    """A child that does `work` and exits 0; its process id and a pipe on which it tells of every write of a save."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            work(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def wait_for_save(reading: int, count: int) -> None:
    """Returns inside the child's `count`-th write of a save, or when it is done."""
    for _ in range(count):
        if not os.read(reading, 1):
            return


def run_trial(work: Callable[[int], None], in_save: bool, chance: random.Random) -> bool:
    """Starts a process and kills it; whether it was quicker."""
    child, reading = fork(work)
    if in_save:
        wait_for_save(reading, chance.randrange(1, 40))
        time.sleep(chance.random() * 0.002)
    else:
        deadline = time.monotonic() + chance.random() * 0.6
        while time.monotonic() < deadline and not done(reading):
            time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "the run ended in an error"
        return True
    return False


def done(reading: int) -> bool:
    ready, _, _ = select.select([reading], [], [], 0)
    return bool(ready) and not os.read(reading, 4096)


def test_killed_runs_end_equal_to_the_last_bit(tmp_path: Path) -> None:
    assert aside(try_kills, str(tmp_path), timeout=None if TORTURE else 300) == 0


def try_kills(folder: str) -> None:
    importlib.import_module("torch._dynamo")  # what optimisers would load in every child
    tmp_path, monkeypatch = Path(folder), pytest.MonkeyPatch()  # never undone: the process ends here
    recipe, text, chance = make_recipe(training_steps=STEPS, training_keep=2), make_text(300), random.Random(1)
    child, reading = fork(lambda _: train(recipe, tmp_path / "whole", text, monkeypatch))
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    expected, curve = content(tmp_path / f"whole/checkpoint-{STEPS}"), losses(tmp_path / "whole")
    out = tmp_path / "run"

    def work(writing: int) -> None:
        write = store._write_synced

        def telling(path: Path, content: store.Content) -> store.Entry:
            os.write(writing, b".")
            return write(path, content)

        store._write_synced = telling
        train(recipe, out, text, monkeypatch, resume="auto")

    killed = killed_in_saves = finished = 0
    while killed < KILLS or killed_in_saves < IN_SAVES or not finished:
        in_save = killed_in_saves < IN_SAVES and chance.random() < 0.5
        if not run_trial(work, in_save, chance):
            killed += 1
            killed_in_saves += in_save
        elif out.exists():
            finished += 1
            assert content(out / f"checkpoint-{STEPS}") == expected
            assert losses(out) == curve
            # What a kill leaves behind carries a name of ours and is gone when the run is.
            assert not [path for path in out.iterdir() if path.name.startswith(".checkpoint")]
            shutil.rmtree(out)
    assert killed >= KILLS
    assert finished >= 1
