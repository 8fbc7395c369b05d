"""Reliability: after SIGKILL at random times, inside saves and during the start, a resumed run ends bit-equal.

Each trial is forked from a process that has imported torch but not computed yet. `make torture SEED=7` draws other
times.
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
from longspan.training.observers.metrics import read_lines
from longspan.training.recipe import Recipe
from tests.training.conftest import content, make_recipe, make_text, run_in_process, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
SEED = int(os.environ.get("LONGSPAN_SEED", "1"))
KILLS, IN_SAVES = (500, 100) if TORTURE else (6, 3)
STEPS, BRANCHED = 12, 5
# About the number of file operations from the start of a run to the end of its first save.
START = 40


def fork(work: Callable[[int], object]) -> tuple[int, int]:
    """A child that does `work` and exits 0: its process id, and a pipe with a byte for every write of a save."""
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
    """Returns during the child's `count`-th write of a save, or when the child has ended."""
    for _ in range(count):
        if not os.read(reading, 1):
            return


def run_trial(work: Callable[[int], None], in_save: bool, rng: random.Random) -> bool:
    """Start a process and kill it. Returns whether it finished first."""
    child, reading = fork(work)
    if in_save:
        wait_for_save(reading, rng.randrange(1, 40))
        time.sleep(rng.random() * 0.002)
    else:
        deadline = time.monotonic() + rng.random() * 0.6
        while time.monotonic() < deadline and not done(reading):
            time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "the run failed"
        return True
    return False


def done(reading: int) -> bool:
    ready, _, _ = select.select([reading], [], [], 0)
    return bool(ready) and not os.read(reading, 4096)


def die_before(count: int, folder: Path) -> None:
    """Kill this process before its `count`-th file operation in `folder`."""
    left = count

    def counted(operation: Callable[..., object]) -> Callable[..., object]:
        def replacement(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= not isinstance(arguments[0], Path) or arguments[0].is_relative_to(folder)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return replacement

    for place, name in [(Path, "open"), *((os, name) for name in ("mkdir", "rename", "fsync", "unlink", "rmdir"))]:
        setattr(place, name, counted(getattr(place, name)))


def test_killed_runs_end_bit_equal(tmp_path: Path) -> None:
    assert run_in_process(try_kills, str(tmp_path), timeout=None if TORTURE else 300) == 0


def try_kills(folder: str) -> None:
    importlib.import_module("torch._dynamo")  # optimizers would import it in every child
    trials = Trials(Path(folder), random.Random(SEED))
    trials.kill_anywhere()
    trials.kill_starts(branch=False)
    trials.kill_starts(branch=True)


class Trials:
    """Runs that are killed and resumed until they finish, compared with uninterrupted runs."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.out, self.rng = folder, folder / "run", rng
        self.text, self.patch = make_text(300), pytest.MonkeyPatch()  # never undone: the process ends here
        self.recipe = make_recipe(training_steps=STEPS, training_keep=2)
        self.lower = make_recipe(training_steps=STEPS, training_keep=2, training_lr=0.001)
        every = make_recipe(training_steps=STEPS)
        self.start = str(folder / f"uninterrupted/checkpoint-{BRANCHED}")
        self._finish(lambda _: train(every, folder / "uninterrupted", self.text, self.patch))
        self._finish(lambda _: train(self.lower, folder / "branch", self.text, self.patch, resume=self.start))

    def _finish(self, work: Callable[[int], object]) -> None:
        child, reading = fork(work)
        os.close(reading)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def check(self, uninterrupted: str) -> None:
        """The run has the same result as an uninterrupted one."""
        expected = self.folder / uninterrupted
        last = f"checkpoint-{STEPS}"
        assert content(self.out / last) == content(expected / last)
        assert curve(self.out) == curve(expected)
        # Temporary files of killed processes are removed by the end of the run.
        assert not [path for path in self.out.iterdir() if path.name.startswith(".")]
        shutil.rmtree(self.out)

    def kill_anywhere(self) -> None:
        def work(writing: int) -> None:
            write = store._write_synced

            def signalling(path: Path, content: store.Content) -> store.Entry:
                os.write(writing, b".")
                return write(path, content)

            store._write_synced = signalling
            train(self.recipe, self.out, self.text, self.patch, resume="auto")

        killed = killed_in_saves = finished = 0
        while killed < KILLS or killed_in_saves < IN_SAVES or not finished:
            in_save = killed_in_saves < IN_SAVES and self.rng.random() < 0.5
            if not run_trial(work, in_save, self.rng):
                killed += 1
                killed_in_saves += in_save
            elif self.out.exists():
                finished += 1
                self.check("uninterrupted")
        print(f"seed {SEED}: {killed} kills, {killed_in_saves} of them in saves, {finished} runs finished")

    def kill_starts(self, branch: bool) -> None:
        """Kill the processes of a run, or of a branch, a few times as they start."""
        recipe = self.lower if branch else self.recipe
        killed = finished = 0
        while killed < KILLS // 2 or not finished:
            for _ in range(self.rng.randrange(1, 4)):
                killed += self._kill_start(recipe, branch)
            self._finish(lambda _: self._train(recipe, branch))
            self.check("branch" if branch else "uninterrupted")
            finished += 1
        print(f"seed {SEED}: {killed} kills at the start of {'branches' if branch else 'runs'}, {finished} finished")

    def _kill_start(self, recipe: Recipe, branch: bool) -> bool:
        count = self.rng.randrange(1, START)

        def work(_: int) -> None:
            die_before(count, self.folder)
            self._train(recipe, branch)

        child, reading = fork(work)
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), "the run failed"
        return code != 0

    def _train(self, recipe: Recipe, branch: bool) -> None:
        """As a user would: repeat the first command until the run exists, then use --resume auto."""
        exists = not branch or (self.out / "recipe.toml").exists()
        train(recipe, self.out, self.text, self.patch, resume="auto" if exists else self.start)


def curve(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_lines(out / "metrics.jsonl")]
