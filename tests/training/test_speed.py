"""The speed of steps, by a clock that tests set."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from longspan.training import run
from longspan.training.ledger import Entry, Ledger, Moment, Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.step import Step
from tests.training.conftest import make_recipe, make_text

CPU = torch.device("cpu")
TOKENS = 100


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Device(Ledger):
    """A ledger of a simulated device, which does what it was asked for while the host asks for more."""

    def __init__(self, clock: Clock, window: int) -> None:
        super().__init__(CPU)
        self.time, self.window, self.runs_ahead = clock, window, True
        self.busy_until = clock.now

    def _now(self) -> Moment:
        return Event(self)

    def launch(self, step: int, asking: float, taking: float) -> list[Row]:
        self.begin()
        self.time.wait(asking)
        self.busy_until = max(self.busy_until, self.time.now) + taking
        return self.add(Entry(step, step * TOKENS, 0.1, self.time.now, ""), torch.zeros(4))


class Event(Moment):
    """When the device has done all that it was asked for before."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, max(device.busy_until, device.time.now)

    def synchronize(self) -> None:
        self.device.time.now = max(self.device.time.now, self.at)


@pytest.mark.parametrize(("asking", "taking"), [(0.001, 0.01), (0.01, 0.001)])
def test_the_speed_is_that_of_the_device_whenever_its_figures_are_read(asking: float, taking: float) -> None:
    """Steps are asked for faster than they are taken, or slower; validation and saving come between them."""
    clock = Clock()
    device, rows = Device(clock, window=4), []
    for step in range(1, 31):
        rows += device.launch(step, asking, taking)
        if step in (6, 17, 18, 30):
            rows += device.drain()
            clock.wait(60.0)
    assert [row.step for row in rows] == list(range(1, 31))
    # The last step of some is still under way when the next is asked for; nothing else comes into it.
    assert min(row.tokens_per_second for row in rows) >= TOKENS / (asking + taking) - 0.1
    assert max(row.tokens_per_second for row in rows) <= TOKENS / max(asking, taking) + 0.1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The time by which trainers of a test count."""
    chosen = Clock()
    monkeypatch.setattr(Trainer, "clock", chosen)
    return chosen


def take(trainer: Trainer, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> list[Row]:
    """Run to the end; the step of each number takes some seconds."""
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
    """A validation every so many steps, which takes some time."""

    def __init__(self, clock: Clock, every: int, seconds: float) -> None:
        self.clock, self.every, self.seconds = clock, every, seconds

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0:
            trainer.settle()
            self.clock.wait(self.seconds)
            trainer.announce(Validation(trainer.step, 1, 1.0))


def test_the_speed_leaves_out_what_comes_between_steps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer = run.make_trainer(make_recipe(training_steps=9), make_text(), CPU, [Pauses(clock, 2, 60.0)])
    rows = take(trainer, clock, monkeypatch, lambda step: 0.5)
    assert [row.tokens_per_second for row in rows] == [pytest.approx(32 / 0.5)] * 9


class InFours(Ledger):
    """A ledger that waits for the figures of four steps, as one of a GPU waits for more."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.window = 4


@pytest.mark.parametrize(("record", "times"), [(False, 1), (True, 2)])
def test_a_step_that_is_compiled_or_recorded_is_told_and_counts_alone(
    record: bool,
    times: int,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []

    class Tells(Observer):
        def preparing(self, trainer: Trainer, what: str) -> None:
            told.append(trainer.step + 1)

    recipe = make_recipe(training_steps=20, training_record=record, data_documents=False)
    _, trainer = run.make_trainer(recipe, make_text(), CPU, [Tells()])
    monkeypatch.setattr("longspan.training.loop.Ledger", InFours)
    trainer.fast_objective = torch.nn.Sequential()  # another than the plain one, as a compiled one is
    monkeypatch.setattr(trainer.fast_objective, "forward", trainer.objective.forward)
    rows = take(trainer, clock, monkeypatch, lambda step: 50.0 if step in told else 1.0)
    # The memory of 12 tokens is full after two steps of 8: before, steps are taken as they are.
    assert told == list(range(3, 3 + times))
    assert [row.step for row in rows if row.tokens_per_second != 32.0] == told
