"""Metrics of each step, fetched from the device without stalling it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longspan.errors import TrainingError
from longspan.shapes import Float, Tensor

WINDOW = 16
"""Steps per copy to the host. Copying the metrics of every step would stall the device."""


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl; `loss` is in nats, `seconds` counts from the start of the run.

    `tokens_per_second` is the mean over the steps whose metrics were copied together, by the clock of the device. It
    excludes the time between steps (validation, saving).
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
    mfu: float | None = None
    """Model FLOPs utilisation; None on a device whose peak is unknown."""
    memory_gib: tuple[float, ...] = ()
    """The most memory that each process has used; empty on a CPU with one process."""


@dataclass(frozen=True)
class Entry:
    """What the host knows about a step before its metrics arrive; `place` is the position of its batch in the text,
    `peak` the tokens per second at a utilisation of 1, `memory` the bytes that each process has used."""

    step: int
    tokens: int
    lr: float
    seconds: float
    place: str
    peak: float | None = None
    memory: tuple[float, ...] = ()


class HostEvent:
    """A time on the host, with the part of the interface of CUDA events that is used here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.at = clock()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to another."""
        return 1000 * (end.at - self.at)


class Ledger:
    """Entries in the order of the steps. They become rows when their metrics (loss, norm, skipped, broken) arrive.

    `step` and `tokens` are those of the last row that has arrived.
    """

    def __init__(
        self, device: torch.device, step: int = 0, tokens: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self.clock = device, clock
        self.runs_ahead = device.type == "cuda"
        self.window = WINDOW if self.runs_ahead else 1
        self.pending: list[tuple[Entry, Tensor]] = []
        self.in_transit: tuple[list[Entry], Tensor, Any] | None = None
        self.step, self.tokens = step, tokens
        self.since: Any = None

    def begin(self) -> None:
        """Called before each step. If no step is pending, the time since the last one does not count."""
        if not self.pending and self.in_transit is None:
            self.since = self._now()

    def add(self, entry: Entry, metrics: Float[Tensor, "4"]) -> list[Row]:
        """Add a step and return the rows that have arrived since."""
        self.pending.append((entry, metrics))
        if len(self.pending) < self.window:
            return []
        if not self.runs_ahead:
            return self.drain()
        arrived = self._arrive()
        self._send()
        return arrived

    def drain(self) -> list[Row]:
        """Wait for all remaining rows and return them."""
        arrived = self._arrive()
        if self.pending:
            self._send()
            arrived += self._arrive()
        return arrived

    def _send(self) -> None:
        entries = [entry for entry, _ in self.pending]
        metrics = torch.stack([metrics for _, metrics in self.pending])
        self.pending = []
        if metrics.is_cuda:
            host = torch.empty(metrics.shape, dtype=metrics.dtype, pin_memory=True)
            metrics = host.copy_(metrics, non_blocking=True)
        self.in_transit = (entries, metrics, self._now())

    def _arrive(self) -> list[Row]:
        if self.in_transit is None:
            return []
        entries, metrics, end = self.in_transit
        self.in_transit = None
        end.synchronize()
        spent = max(self.since.elapsed_time(end) / 1000, 1e-9)
        speed = (entries[-1].tokens - self.tokens) / spent
        self.step, self.tokens, self.since = entries[-1].step, entries[-1].tokens, end
        return [_row(entry, numbers, speed) for entry, numbers in zip(entries, metrics.tolist(), strict=True)]

    def _now(self) -> Any:
        """An event after all work queued so far, by the clock of the device, because the host runs ahead of it."""
        if self.device.type != "cuda":
            return HostEvent(self.clock)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class NotFiniteError(TrainingError):
    """The loss or gradient of a step is not finite, or with an empty `batch` the weights."""

    def __init__(self, message: str, batch: str = "") -> None:
        super().__init__(message)
        self.batch = batch


def _row(entry: Entry, metrics: list[float], speed: float) -> Row:
    loss, norm, skipped, broken = metrics
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
        mfu=None if entry.peak is None else float(f"{speed / entry.peak:.4g}"),  # small models: far below 0.01%
        memory_gib=tuple(round(used / 2**30, 3) for used in entry.memory),
    )
    return NotFiniteRow(**vars(row), place=entry.place) if broken else row


@dataclass(frozen=True)
class NotFiniteRow(Row):
    """A step that was not finite. Neither it nor any later step has changed the weights."""

    place: str = ""

    def error(self) -> NotFiniteError:
        what = "loss" if not math.isfinite(self.loss) else "gradient"
        return NotFiniteError(
            f"the {what} of step {self.step} is not finite (batch: {self.place}); "
            "weights and checkpoints are unchanged since the step before",
            self.place,
        )
