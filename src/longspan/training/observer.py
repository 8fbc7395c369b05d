"""Observers: progress, metrics, checkpoints and validation are attached to the training loop through this interface."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from longspan.training.ledger import Row

if TYPE_CHECKING:
    from longspan.training.loop import Trainer


class ResumeWarning(UserWarning):
    """A change that a resume accepts, with its effect."""


@dataclass(frozen=True)
class Validation:
    """The score on held-out text after `step` steps."""

    unit: ClassVar[str] = "tokens"
    step: int
    tokens: int
    nats: float
    bits_per_byte: float | None = None
    """None if every token is a byte."""

    @property
    def score(self) -> float:
        """`nats` for comparisons: a score that is not finite is worse than any other."""
        return self.nats if math.isfinite(self.nats) else math.inf

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def sentence(self) -> str:
        """The score, to be printed."""
        per_byte = f", {self.bits_per_byte:.4f} per byte" if self.bits_per_byte is not None else ""
        return f"{self.bits:.4f} bits per token{per_byte}"


class Observer:
    """Watches a run. Observers are called in list order: `after_step` after each step, `row` when its metrics arrive.

    `fact_types` has the type of each of its `facts`. A checkpoint is checked against them before `restore`."""

    fact_types: ClassVar[Mapping[str, Any]] = {}

    def preflight(self, trainer: "Trainer") -> None:
        """Called before anything is written. Try what is done later, so that it fails now."""

    def begin(self, trainer: "Trainer") -> None:
        """Before the first step of this process."""

    def preparing(self, trainer: "Trainer", what: str) -> None:
        """The next step is slow, because it is compiled or captured; `what` describes it."""

    def row(self, trainer: "Trainer", row: Row) -> None:
        """The metrics of a step, in order. On a GPU they arrive some steps late."""

    def after_step(self, trainer: "Trainer") -> None:
        """Called after each step; the weights are those after `trainer.step` steps."""

    def validated(self, trainer: "Trainer", validation: Validation) -> None:
        """Called after each validation."""

    def settle(self) -> None:
        """Called before a checkpoint is saved: flush everything about earlier steps to disk."""

    def end(self, trainer: "Trainer") -> None:
        """Called when the loop ends, also after an error, and if `begin` fails."""

    def facts(self) -> dict[str, Any]:
        """What a resume needs, as plain values."""
        return {}

    def restore(self, facts: dict[str, Any]) -> None:
        """Restore the result of `facts`."""

    def branched(self) -> None:
        """Called after `restore` if the checkpoint belongs to another run."""
