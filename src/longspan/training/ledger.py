"""What each step came to, fetched from the device without making it wait."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longspan.errors import TrainingError
from longspan.shapes import Float, Tensor

WINDOW = 16
"""Steps whose figures travel together where fetching them one by one would make the device wait."""


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl; `loss` is in nats, `seconds` counts from the beginning of the run.

    `tokens_per_second` is that of the steps whose figures were read together, by the clock of the device; what happens
    between steps (validation, saving) does not count.
    """

    step: int
    tokens: int
    loss: float
    bits: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    skipped: bool = False


@dataclass(frozen=True)
class Entry:
    """What is known of a step before the device has answered; `place` says where its batch lies in the text."""

    step: int
    tokens: int
    lr: float
    seconds: float
    place: str


class Moment:
    """A moment of the host, with the part of a CUDA event's interface that is used here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.at = clock()

    def synchronize(self) -> None:
        """Wait until it has come."""

    def elapsed_time(self, end: "Moment") -> float:
        """Milliseconds from this moment to another."""
        return 1000 * (end.at - self.at)


class Ledger:
    """Entries in the order of the steps, made into rows as their figures (loss, norm, skipped, broken) arrive.

    `step` and `tokens` are those of the last row that has arrived.
    """

    def __init__(
        self, device: torch.device, step: int = 0, tokens: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self.clock = device, clock
        self.runs_ahead = device.type == "cuda"
        self.window = WINDOW if self.runs_ahead else 1
        self.waiting: list[tuple[Entry, Tensor]] = []
        self.travelling: tuple[list[Entry], Tensor, Any] | None = None
        self.step, self.tokens = step, tokens
        self.since: Any = None

    def begin(self) -> None:
        """A step is about to be handed over. If no other is on its way, the time since the last one was a pause."""
        if not self.waiting and self.travelling is None:
            self.since = self._now()

    def add(self, entry: Entry, figures: Float[Tensor, "4"]) -> list[Row]:
        """Note a step; gives the rows that have arrived meanwhile."""
        self.waiting.append((entry, figures))
        if len(self.waiting) < self.window:
            return []
        if not self.runs_ahead:
            return self.drain()
        arrived = self._arrive()
        self._send()
        return arrived

    def drain(self) -> list[Row]:
        """Every row that is still out."""
        arrived = self._arrive()
        if self.waiting:
            self._send()
            arrived += self._arrive()
        return arrived

    def _send(self) -> None:
        entries = [entry for entry, _ in self.waiting]
        figures = torch.stack([figures for _, figures in self.waiting])
        self.waiting = []
        if figures.is_cuda:
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            figures = host.copy_(figures, non_blocking=True)
        self.travelling = (entries, figures, self._now())

    def _arrive(self) -> list[Row]:
        if self.travelling is None:
            return []
        entries, figures, end = self.travelling
        self.travelling = None
        end.synchronize()
        spent = max(self.since.elapsed_time(end) / 1000, 1e-9)
        speed = (entries[-1].tokens - self.tokens) / spent
        self.step, self.tokens, self.since = entries[-1].step, entries[-1].tokens, end
        return [_row(entry, numbers, speed) for entry, numbers in zip(entries, figures.tolist(), strict=True)]

    def _now(self) -> Any:
        """When the device will have done what it was asked for so far, by its own clock: the host runs ahead of it."""
        if self.device.type != "cuda":
            return Moment(self.clock)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class NotFiniteError(TrainingError):
    """A step whose loss or gradient is not finite."""


def _row(entry: Entry, figures: list[float], speed: float) -> Row:
    loss, norm, skipped, broken = figures
    row = Row(
        step=entry.step,
        tokens=entry.tokens,
        loss=loss,
        bits=loss / math.log(2),
        lr=entry.lr,
        grad_norm=norm,
        tokens_per_second=round(speed, 1),
        seconds=round(entry.seconds, 3),
        skipped=bool(skipped),
    )
    return Broken(**vars(row), place=entry.place) if broken else row


@dataclass(frozen=True)
class Broken(Row):
    """A step that was not finite; from it on the weights have not moved."""

    place: str = ""

    def error(self) -> NotFiniteError:
        what = "loss" if not math.isfinite(self.loss) else "gradient"
        return NotFiniteError(
            f"step {self.step} has a {what} that is not finite, on the batch at {self.place}; the weights are as they "
            "were before it and no checkpoint was touched"
        )
