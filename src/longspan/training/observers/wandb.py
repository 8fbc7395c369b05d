"""Sends the metrics to Weights & Biases: `longspan train --track wandb`."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

from longspan import config
from longspan.errors import ConfigError
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.metrics import write_errors
from longspan.training.observers.trackers import tracker_errors, tracker_warnings

RUN = "wandb_run.txt"


class WandB(Observer):
    """The metrics as curves. A resumed run continues the same curves: its id is in the folder of the run.

    The environment variables of wandb apply: WANDB_MODE=offline writes to the folder only, WANDB_PROJECT names the
    project (default: longspan).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: Any = None
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "--track wandb needs the package wandb; install it with: pip install 'longspan[wandb]'"
            ) from None
        self.wandb: Any = wandb

    def begin(self, trainer: Trainer) -> None:
        known = self.folder / RUN
        identity = known.read_text(encoding="utf-8").strip() if known.is_file() else uuid4().hex[:8]
        with write_errors(known):
            known.write_text(identity, encoding="utf-8")
        recipe = trainer.recipe
        values = {"recipe": recipe.name, "family": recipe.family, "parameters": trainer.model.parameter_count}
        values |= {"model": config.plain(recipe.model), "training": config.plain(recipe.training)}
        with self._errors():
            self.run = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT", "longspan"),
                dir=str(self.folder),
                id=identity,
                name=self.folder.name,
                resume="allow",
                config=values,
            )

    def row(self, trainer: Trainer, row: Row) -> None:
        names = ("loss", "bits", "lr", "grad_norm", "tokens_per_second", "tokens")
        values = {f"training/{name}": getattr(row, name) for name in names}
        with self._errors():
            self.run.log(values, step=row.step)

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        values = {"validation/loss": validation.nats, "validation/bits": validation.bits}
        with self._errors():
            self.run.log(values | {"validation/step": validation.step})

    def end(self, trainer: Trainer) -> None:
        if self.run is not None:
            with tracker_warnings("Weights & Biases"):
                self.run.finish(exit_code=0 if trainer.finished or trainer.interrupted else 1)

    def _errors(self) -> AbstractContextManager[None]:
        return tracker_errors("Weights & Biases", "check the connection and `wandb login`")
