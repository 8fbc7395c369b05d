"""Early stopping."""

import math
from typing import Any, ClassVar

from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation


class EarlyStop(Observer):
    """Stops the run after `patience` consecutive validations without a new best score."""

    fact_types: ClassVar = {"best": float, "waited": int}

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best, self.waited = math.inf, 0

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        if validation.score < self.best:
            self.best, self.waited = validation.score, 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            trainer.stopped_early = trainer.finished = True

    def facts(self) -> dict[str, Any]:
        best = {"best": self.best} if math.isfinite(self.best) else {}
        return {**best, "waited": self.waited}

    def restore(self, facts: dict[str, Any]) -> None:
        self.best, self.waited = float(facts.get("best", math.inf)), int(facts.get("waited", 0))
