"""The measured speed of steps, with a simulated clock."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.training import run
from longspan.training.ledger import Entry, HostEvent, Ledger, Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.metrics import Metrics, read_lines
from longspan.training.step import Step
from tests.training.conftest import make_recipe, make_text

CPU = torch.device("cpu")
TOKENS = 100


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Device(Ledger):
    """The ledger of a simulated device that runs queued work while the host queues more."""

    def __init__(self, clock: Clock, window: int) -> None:
        super().__init__(CPU)
        self.time, self.window, self.runs_ahead = clock, window, True
        self.busy_until = clock.now

    def _now(self) -> HostEvent:
        return Event(self)

    def launch(self, step: int, queueing: float, running: float) -> list[Row]:
        self.begin()
        self.time.wait(queueing)
        self.busy_until = max(self.busy_until, self.time.now) + running
        return self.add(Entry(step, step * TOKENS, 0.1, self.time.now, ""), torch.zeros(4))


class Event(HostEvent):
    """The time at which the device has finished all queued work."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, max(device.busy_until, device.time.now)

    def synchronize(self) -> None:
        self.device.time.now = max(self.device.time.now, self.at)


@pytest.mark.parametrize(("queueing", "running"), [(0.001, 0.01), (0.01, 0.001)])
def test_the_speed_is_that_of_the_device_whenever_metrics_are_read(queueing: float, running: float) -> None:
    """The host queues steps faster than the device runs them, or slower. Validation and saving come between them."""
    clock = Clock()
    device, rows = Device(clock, window=4), []
    for step in range(1, 31):
        rows += device.launch(step, queueing, running)
        if step in (6, 17, 18, 30):
            rows += device.drain()
            clock.wait(60.0)
    assert [row.step for row in rows] == list(range(1, 31))
    # A step may still run when the next one is queued. Nothing else adds to the time.
    assert min(row.tokens_per_second for row in rows) >= TOKENS / (queueing + running) - 0.1
    assert max(row.tokens_per_second for row in rows) <= TOKENS / max(queueing, running) + 0.1


def test_a_small_utilisation_is_written(tmp_path: Path) -> None:
    """A tiny model on a large GPU reaches less than one part in 10,000, which must not look like an unknown peak."""
    clock = Clock()
    ledger, metrics = Ledger(CPU, clock=clock), Metrics(tmp_path)
    ledger.begin()
    clock.wait(0.5)
    (row,) = ledger.add(Entry(1, 100, 0.1, 0.5, "", peak=1e9), torch.zeros(4))
    with (tmp_path / "metrics.jsonl").open("w") as metrics.files["metrics.jsonl"]:
        metrics.row(Trainer.__new__(Trainer), row)
    assert read_lines(tmp_path / "metrics.jsonl")[0]["mfu"] == pytest.approx(100 / 0.5 / 1e9, rel=1e-3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of all trainers in a test."""
    chosen = Clock()
    monkeypatch.setattr(Trainer, "clock", chosen)
    return chosen


def take(trainer: Trainer, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> list[Row]:
    """Run to the end; `seconds` gives the duration of each step."""
    rows: list[Row] = []
    work = trainer.work.__call__

    def slow(self: Step, *given: Any) -> Any:
        clock.wait(seconds(trainer.step + 1))
        return work(*given)

    class Rows(Observer):
        def row(self, trainer: Trainer, row: Row) -> None:
            rows.append(row)

    monkeypatch.setattr(Step, "__call__", slow)
    trainer.observers.append(Rows())
    trainer.run()
    return rows


class Pauses(Observer):
    """A validation every `every` steps that takes some seconds."""

    def __init__(self, clock: Clock, every: int, seconds: float) -> None:
        self.clock, self.every, self.seconds = clock, every, seconds

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0:
            trainer.settle()
            self.clock.wait(self.seconds)
            trainer.announce(Validation(trainer.step, 1, 1.0))


def test_the_speed_excludes_time_between_steps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer = run.make_trainer(make_recipe(training_steps=9), make_text(), CPU, [Pauses(clock, 2, 60.0)])
    rows = take(trainer, clock, monkeypatch, lambda step: 0.5)
    assert [row.tokens_per_second for row in rows] == [pytest.approx(32 / 0.5)] * 9


class InFours(Ledger):
    """A ledger that reads the metrics of four steps together, as on a GPU."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.window = 4


@pytest.mark.parametrize(("graph", "times"), [(False, 1), (True, 2)])
def test_a_step_that_is_compiled_or_captured_is_announced_and_timed_alone(
    graph: bool,
    times: int,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced: list[int] = []

    class Announced(Observer):
        def preparing(self, trainer: Trainer, what: str) -> None:
            announced.append(trainer.step + 1)

    recipe = make_recipe(training_steps=20, training_cuda_graph=graph, data_documents=False)
    _, trainer = run.make_trainer(recipe, make_text(), CPU, [Announced()])
    monkeypatch.setattr("longspan.training.loop.Ledger", InFours)
    trainer.fast_objective = torch.nn.Sequential()  # not the eager one, as after torch.compile
    monkeypatch.setattr(trainer.fast_objective, "forward", trainer.objective.forward)
    rows = take(trainer, clock, monkeypatch, lambda step: 50.0 if step in announced else 1.0)
    # The memory of 12 tokens is full after two steps of 8. Before that, steps are eager.
    assert announced == list(range(3, 3 + times))
    assert [row.step for row in rows if row.tokens_per_second != 32.0] == announced
