"""Held-out text, scored every so many steps and at the end."""

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.data.encoded import Encoded
from longspan.errors import DataError
from longspan.evaluation.likelihood import Tally, stream_losses
from longspan.tokens import Ids
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, ResumeWarning, Validation

PIECES = 16


class Validate(Observer):
    """Scores with the recipe's evaluation settings, on as many lanes as training has rows.

    `tokens` takes a sample: its pieces lie evenly over the text, since the beginning alone may be of one kind.
    Where a score `decides` about training (patience, the average trigger), a resume needs the same text.
    """

    def __init__(self, text: Encoded, every: int, tokens: int | None = None, *, decides: bool = False) -> None:
        self.every, self.decides = every, decides
        self.name, self.fingerprint = text.name, text.fingerprint
        self.ids, self.starts = sample(text, tokens)

    def rehearse(self, trainer: Trainer) -> None:
        self.score(trainer, most=2 * (trainer.recipe.evaluation.segment or trainer.recipe.model.segment) + 1)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 or trainer.finished:
            # A step that was not finite must be found out before its weights are scored and called the best.
            trainer.settle()
            trainer.announce(self.score(trainer))

    def score(self, trainer: Trainer, most: int | None = None) -> Validation:
        """What the model makes of the sample, or of its first `most` tokens."""
        chosen, segment = trainer.recipe.evaluation, trainer.recipe.model.segment
        ids = self.ids[:most]
        lanes = max(1, min(max(chosen.lanes, trainer.lanes.batch), (len(ids) - 1) // segment))
        starts = self.starts[self.starts < len(ids)] if trainer.recipe.data.documents else None
        tally = Tally()
        with trainer.as_model(**chosen.settings) as model, trainer.autocast():
            for stretch in stream_losses(model, ids, segment=chosen.segment or segment, lanes=lanes, starts=starts):
                tally.add(stretch)
        return Validation(trainer.step, tally.count, tally.mean)

    def facts(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def restore(self, facts: dict[str, Any]) -> None:
        before = str(facts.get("fingerprint", self.fingerprint))
        if before == self.fingerprint:
            return
        changed = (
            f"the valid split of {self.name} has changed since the checkpoint (fingerprint {self.fingerprint[:12]}, "
            f"then {before[:12]})"
        )
        if self.decides:
            raise DataError(
                f"{changed}, and its scores decide about training; bring back the old text, or begin a new run"
            )
        kept = "best/ is replaced only by a score better than its own on the old text"
        warnings.warn(f"{changed}; {kept}", ResumeWarning, stacklevel=2)


def sample(text: Encoded, tokens: int | None) -> tuple[Ids, NDArray[np.int64]]:
    """About `tokens` tokens of a text in evenly spaced pieces, and where documents and pieces begin in them."""
    if tokens is None or tokens >= len(text):
        return text.ids, text.starts
    size = max(2, tokens // PIECES)
    places = np.linspace(0, len(text) - size, max(1, tokens // size)).astype(np.int64)
    at = (places[:, None] + np.arange(size)).ravel()
    begins = np.isin(at, text.starts)
    begins[::size] = True
    return text.ids[at], np.flatnonzero(begins)
