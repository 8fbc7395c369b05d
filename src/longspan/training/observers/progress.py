"""Progress on standard error: a live line in a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from longspan.terminal import PLAIN_SECONDS, unguarded
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation

MEANINGFUL_SECONDS = 5.0
"""The time left is not shown before steps have taken this long."""


class Mark(NamedTuple):
    """Where the measurement for the time left starts."""

    time: float
    done: float
    step: int


class Progress(Observer):
    """Prints the given lines about the text, then step, loss, tokens per second and time left. Losses of tasks are not
    printed in bits: those of similarity are squared errors.

    The time left is estimated from the steps after the first one, or after the last one that was compiled or captured.
    """

    def __init__(
        self, lines: Sequence[str] = (), clock: Callable[[], float] = time.monotonic, *, in_bits: bool = True
    ) -> None:
        self.lines, self.clock, self.in_bits = lines, clock, in_bits
        self.bar: Any = None
        self.task: Any = None
        self.printed = self.latest = clock()
        self.mark: Mark | None = None
        self.pause = 0.0

    def begin(self, trainer: Trainer) -> None:
        for line in self.lines:
            self._print(line)
        if sys.stderr.isatty():
            self._open_bar(trainer)

    def _open_bar(self, trainer: Trainer) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self.bar = Bar(*columns, console=Console(file=unguarded(sys.stderr)), transient=True)
        self.bar.start()
        self.task = self.bar.add_task(f"step {trainer.step}", total=1.0, completed=trainer.progress)

    def preparing(self, trainer: Trainer, what: str) -> None:
        self._print(f"{what}; this may take a minute")
        self.mark = None

    def row(self, trainer: Trainer, row: Row) -> None:
        self.latest = self.clock()
        line = f"step {row.step}  " + (f"{row.bits:.3f} bits" if self.in_bits else f"loss {row.loss:.4f}")
        first = self.mark is None
        if self.mark is None:
            self.mark = Mark(self.latest, trainer.reported_progress, trainer.ledger.step)
        else:
            line += f"  {row.tokens_per_second:,.0f} tokens/s{self._left(trainer, self.mark)}"
        if row.skipped:
            self._print(f"step {row.step}: the gradient norm spiked to {row.grad_norm:.3g}; update skipped")
        if self.bar is not None:
            self.bar.update(self.task, completed=trainer.progress, description=line)
        elif first or self.latest - self.printed >= PLAIN_SECONDS:
            self._print(line)

    def _left(self, trainer: Trainer, mark: Mark) -> str:
        spent, moved = self.latest - mark.time, trainer.reported_progress - mark.done
        steps = trainer.ledger.step - mark.step
        if spent < MEANINGFUL_SECONDS or moved <= 0 or steps <= 0:
            return ""
        every = trainer.config.validate_every
        seconds_per_step = spent / steps + (self.pause / every if every else 0.0)
        left = (1.0 - trainer.reported_progress) * steps / moved * seconds_per_step
        minutes, seconds = divmod(round(left), 60)
        return f"  {minutes}:{seconds:02d} left"

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        self.pause = self.clock() - self.latest
        if self.mark is not None:
            # `_left` adds the time of future validations, so that of past ones is not part of the steps.
            self.mark = self.mark._replace(time=self.mark.time + self.pause)
        self._print(f"step {validation.step}  validation: {validation.sentence}")

    def end(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _print(self, line: str) -> None:
        self.printed = self.clock()
        if self.bar is not None:
            self.bar.console.print(line, highlight=False)
        else:
            print_line(line)


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
