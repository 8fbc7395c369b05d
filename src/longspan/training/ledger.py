"""What each step came to, fetched from the device without making it wait."""

import math
from dataclasses import dataclass

import torch

from longspan.errors import TrainingError
from longspan.shapes import Float, Tensor

WINDOW = 16
"""Steps whose figures travel together where fetching them one by one would make the device wait."""


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl; `loss` is in nats, `seconds` counts from the beginning of the run."""

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


class Ledger:
    """Entries in the order of the steps, made into rows as their figures (loss, norm, skipped, broken) arrive."""

    def __init__(self, device: torch.device, tokens: int = 0, seconds: float = 0.0) -> None:
        self.on_cuda = device.type == "cuda"
        self.window = WINDOW if self.on_cuda else 1
        self.waiting: list[tuple[Entry, Tensor]] = []
        self.travelling: tuple[list[Entry], Tensor, torch.cuda.Event | None] | None = None
        self.tokens, self.seconds = tokens, seconds

    def add(self, entry: Entry, figures: Float[Tensor, "4"]) -> list[Row]:
        """Note a step; gives the rows that have arrived meanwhile."""
        self.waiting.append((entry, figures))
        if len(self.waiting) < self.window:
            return []
        if not self.on_cuda:
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
        event = None
        if self.on_cuda:
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            host.copy_(figures, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            figures = host
        self.travelling = (entries, figures, event)

    def _arrive(self) -> list[Row]:
        if self.travelling is None:
            return []
        entries, figures, event = self.travelling
        self.travelling = None
        if event is not None:
            event.synchronize()
        spent = max(entries[-1].seconds - self.seconds, 1e-9)
        speed = (entries[-1].tokens - self.tokens) / spent
        self.tokens, self.seconds = entries[-1].tokens, entries[-1].seconds
        return [_row(entry, numbers, speed) for entry, numbers in zip(entries, figures.tolist(), strict=True)]


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
