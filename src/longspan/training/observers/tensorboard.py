"""TensorBoard events beside metrics.jsonl, where tensorboard is installed."""

from pathlib import Path
from typing import Any

from longspan.training.ledger import Row
from longspan.training.loop import Observer, Trainer, Validation


class TensorBoard(Observer):
    """The same figures as curves. A resume tells the reader to forget the steps it takes back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None

    def begin(self, trainer: Trainer) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        purge = trainer.step + 1 if trainer.step else None
        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge)

    def row(self, trainer: Trainer, row: Row) -> None:
        if self.writer is not None:
            for name in ("loss", "bits", "lr", "grad_norm", "tokens_per_second"):
                self.writer.add_scalar(f"training/{name}", getattr(row, name), row.step)

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        if self.writer is not None:
            self.writer.add_scalar("validation/bits", validation.bits, validation.step)

    def end(self, trainer: Trainer) -> None:
        if self.writer is not None:
            self.writer.close()
