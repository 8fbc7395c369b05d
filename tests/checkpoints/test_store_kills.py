"""SIGKILL at random moments of a process that only saves: no completed save is lost."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.checkpoints.store import LEFTOVER, newest_good, read_folder, sweep, write_folder


def content(step: int) -> dict[str, bytes]:
    return {"step": str(step).encode(), "weights": step.to_bytes(4, "little") * 5000}


def write_until_killed(run: Path, first: int, report: int) -> None:
    for step in range(first, first + 10_000):
        write_folder(run / f"checkpoint-{step}", content(step))
        write_folder(run / "best", content(step), replace=True)
        os.write(report, step.to_bytes(4, "little"))


@pytest.mark.filterwarnings("ignore:checkpoint-")
def test_kills(tmp_path: Path, trials: Callable[[int, int], int]) -> None:
    choose, step, done, interrupted = random.Random(0), 0, 0, 0
    count = trials(12, 200)
    for _ in range(count):
        read, report = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_until_killed(tmp_path, step + 1, report)
            finally:
                os._exit(1)
        os.close(report)
        time.sleep(choose.uniform(0.001, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(read, "rb") as pipe:
            reported = pipe.read()
        done = int.from_bytes(reported[-4:], "little") if reported else done
        interrupted += any(LEFTOVER.fullmatch(path.name) for path in tmp_path.iterdir())
        newest = newest_good(tmp_path, keep=["step", "weights"])
        assert not newest.passed_over, "a checkpoint under its final name is always complete"
        found = int(newest.found.contents["step"]) if newest.found else 0
        assert found >= done
        if done:
            assert int(read_folder(tmp_path / "best", keep=["step"]).contents["step"]) >= done
        step = found
        for old in range(max(0, step - 40), step - 2):
            for path in (tmp_path / f"checkpoint-{old}").glob("*"):
                path.unlink()
            if (tmp_path / f"checkpoint-{old}").exists():
                (tmp_path / f"checkpoint-{old}").rmdir()
    assert interrupted > count // 4, "many kills should interrupt a write"
    sweep(tmp_path)
    assert not [path for path in tmp_path.iterdir() if LEFTOVER.fullmatch(path.name)]
