"""What watches a run: the loop knows nothing else of progress, metrics, checkpoints or validation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from longspan.training.ledger import Row

if TYPE_CHECKING:
    from longspan.training.loop import Trainer


class ResumeWarning(UserWarning):
    """A change that a resume accepts, and what it does."""


@dataclass(frozen=True)
class Validation:
    """What the model scored on held-out text after `step` steps."""

    step: int
    tokens: int
    nats: float

    @property
    def score(self) -> float:
        """`nats` for comparisons: what is not finite is worse than everything else."""
        return self.nats if math.isfinite(self.nats) else math.inf

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)


class Observer:
    """Watches a run. Called in the order of the list: `after_step` once a step, `row` when its figures have come.

    `kept` gives the type of each of its `facts`, to which a checkpoint is held before `restore`."""

    kept: ClassVar[Mapping[str, Any]] = {}

    def rehearse(self, trainer: "Trainer") -> None:
        """Before anything is written: what it will do later is tried here, so that it fails now if at all."""

    def begin(self, trainer: "Trainer") -> None:
        """Before the first step of this process."""

    def preparing(self, trainer: "Trainer", what: str) -> None:
        """The next step takes long, since something is done in it for the first time; `what` says what."""

    def row(self, trainer: "Trainer", row: Row) -> None:
        """The figures of a step, in order, some steps late where the device runs ahead."""

    def after_step(self, trainer: "Trainer") -> None:
        """The weights are those after `trainer.step` steps."""

    def validated(self, trainer: "Trainer", validation: Validation) -> None:
        """Held-out text was scored."""

    def settle(self) -> None:
        """A checkpoint is about to be made: what belongs to the steps before it must be on the disk."""

    def end(self, trainer: "Trainer") -> None:
        """The loop is over, well or not."""

    def facts(self) -> dict[str, Any]:
        """What it must know after a resume, in plain values."""
        return {}

    def restore(self, facts: dict[str, Any]) -> None:
        """Take back what `facts` gave."""

    def branched(self) -> None:
        """What was restored came from a checkpoint of another run."""
