"""What a person sees: a live line in a terminal, now and then a plain one elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from longspan.data import Encoded
from longspan.terminal import unguarded
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation

PLAIN_SECONDS = 10.0
MEANINGFUL_SECONDS = 5.0
"""A shorter time says little about the time that is left."""


class Mark(NamedTuple):
    """Where the steps begin that the time left is told from."""

    time: float
    done: float
    step: int


class Progress(Observer):
    """Step, bits, tokens per second and time left, on standard error; first of all, the files of each split.

    The time left is told from the steps after the first one, and after one that was compiled or recorded.
    """

    def __init__(self, text: Encoded | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.text, self.clock = text, clock
        self.bar: Any = None
        self.task: Any = None
        self.told = self.latest = clock()
        self.mark: Mark | None = None
        self.pause = 0.0

    def begin(self, trainer: Trainer) -> None:
        for line in self.text.tell_files("train", "valid", "test", "unused") if self.text else ():
            self._say(line)
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
        self._say(f"{what}; this may take a minute")
        self.mark = None

    def row(self, trainer: Trainer, row: Row) -> None:
        self.latest = self.clock()
        line = f"step {row.step}  {row.bits:.3f} bits"
        first = self.mark is None
        if self.mark is None:
            self.mark = Mark(self.latest, trainer.arrived, trainer.ledger.step)
        else:
            line += f"  {row.tokens_per_second:,.0f} tokens/s{self._left(trainer, self.mark)}"
        if row.skipped:
            self._say(f"step {row.step}: the gradient spiked to {row.grad_norm:.3g}; the update was left out")
        if self.bar is not None:
            self.bar.update(self.task, completed=trainer.progress, description=line)
        elif first or self.latest - self.told >= PLAIN_SECONDS:
            self._say(line)

    def _left(self, trainer: Trainer, mark: Mark) -> str:
        spent, moved = self.latest - mark.time, trainer.arrived - mark.done
        steps = trainer.ledger.step - mark.step
        if spent < MEANINGFUL_SECONDS or moved <= 0 or steps <= 0:
            return ""
        every = trainer.config.validate_every
        for_a_step = spent / steps + (self.pause / every if every else 0.0)
        left = (1.0 - trainer.arrived) * steps / moved * for_a_step
        minutes, seconds = divmod(round(left), 60)
        return f"  {minutes}:{seconds:02d} left"

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        self.pause = self.clock() - self.latest
        if self.mark is not None:
            # Validations that are to come count by their number, however many there were so far.
            self.mark = self.mark._replace(time=self.mark.time + self.pause)
        self._say(f"step {validation.step}  held-out text: {validation.bits:.4f} bits per token")

    def end(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _say(self, line: str) -> None:
        self.told = self.clock()
        if self.bar is not None:
            self.bar.console.print(line, highlight=False)
        else:
            say(line)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
