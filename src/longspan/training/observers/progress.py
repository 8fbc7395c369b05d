"""What a person sees: a live line in a terminal, now and then a plain one elsewhere."""

import sys
import time
from typing import Any

from longspan.data import Encoded
from longspan.terminal import unguarded
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation

PLAIN_SECONDS = 10.0


class Progress(Observer):
    """Step, bits, tokens per second and time left, on standard error; first of all, the files of each split."""

    def __init__(self, text: Encoded) -> None:
        self.text = text
        self.bar: Any = None
        self.task: Any = None
        self.told = 0.0
        self.first = (0.0, 0.0)

    def begin(self, trainer: Trainer) -> None:
        self.first = (trainer.seconds, trainer.progress)
        for line in self.text.tell_files("train", "valid", "test", "unused"):
            self._say(line)
        self.told = time.monotonic()
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

    def row(self, trainer: Trainer, row: Row) -> None:
        if row.skipped:
            self._say(f"step {row.step}: the gradient spiked to {row.grad_norm:.3g}; the update was left out")
        if self.bar is not None:
            self.bar.update(self.task, completed=trainer.progress, description=self._line(trainer, row))
        elif time.monotonic() - self.told >= PLAIN_SECONDS or row.step == 1:
            self._say(self._line(trainer, row))

    def _line(self, trainer: Trainer, row: Row) -> str:
        began, done = self.first
        moved = trainer.progress - done
        left = (1.0 - trainer.progress) * (trainer.seconds - began) / moved if moved > 0 else 0.0
        minutes, seconds = divmod(round(left), 60)
        speed = f"{row.tokens_per_second:,.0f} tokens/s"
        return f"step {row.step}  {row.bits:.3f} bits  {speed}  {minutes}:{seconds:02d} left"

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        self._say(f"step {validation.step}  held-out text: {validation.bits:.4f} bits per token")

    def end(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _say(self, line: str) -> None:
        self.told = time.monotonic()
        if self.bar is not None:
            self.bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
