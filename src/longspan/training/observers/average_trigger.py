"""Starts averaging when validation stops improving."""

import math
from typing import Any, ClassVar

from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation


class AverageTrigger(Observer):
    """The non-monotonic trigger of NT-ASGD (Merity et al. 2017, algorithm 1): averaging starts at the first score
    that is worse than the best of those more than `patience` validations before it.

    The validation at the end of a run does not count, so that a run can be made longer without changing the result.
    """

    fact_types: ClassVar = {"scores": tuple[float | None, ...]}

    def __init__(self, patience: int, every: int) -> None:
        self.patience, self.every = patience, every
        self.scores: list[float] = []

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        average = trainer.average
        if average is None or average.start is not None or validation.step % self.every:
            return
        if any(score < validation.score for score in self.scores[: -self.patience]):
            average.start = validation.step - 1  # the mean includes the weights that were scored
        self.scores.append(validation.score)

    def facts(self) -> dict[str, Any]:
        """A score that is not finite is saved as null, because JSON has no infinity."""
        return {"scores": [score if math.isfinite(score) else None for score in self.scores]} if self.scores else {}

    def restore(self, facts: dict[str, Any]) -> None:
        self.scores = [math.inf if score is None else float(score) for score in facts.get("scores", [])]
