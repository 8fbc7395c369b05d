"""Scores held-out text every few steps and at the end."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longspan.contract import LanguageModel
from longspan.data.encoded import Encoded, Excerpt
from longspan.errors import DataError
from longspan.reading import Reading
from longspan.scoring.score import score
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, ResumeWarning, Validation

PIECES = 16


@dataclass(frozen=True)
class ValidationText:
    """What validations of a run are computed on. If a score `decides` about training (patience, the average trigger), a
    resume needs the same text."""

    name: str
    fingerprint: str
    decides: bool

    def facts(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def check(self, facts: dict[str, Any]) -> None:
        """Refuse or report another text than that of these facts."""
        before = str(facts.get("fingerprint", self.fingerprint))
        if before == self.fingerprint:
            return
        changed = f"the {self.name} changed after the checkpoint ({self.fingerprint[:12]}, before {before[:12]})"
        if self.decides:
            raise DataError(f"{changed}, and its scores influence training; restore the old text, or start a new run")
        effect = "best/ is replaced only by a score better than its score on the old text"
        warnings.warn(f"{changed}; {effect}", ResumeWarning, stacklevel=2)


class Validate(Observer):
    """Scores with the recipe's evaluation settings, on at least as many streams as training has rows. A model that does
    not predict the next token is scored by its training loss.

    `tokens` limits it to a sample of evenly spaced pieces, because the beginning of a text may not be typical.
    """

    def __init__(self, text: Encoded, every: int, tokens: int | None = None, *, decides: bool = False) -> None:
        self.every = every
        self.source = ValidationText(f"valid split of {text.name}", text.fingerprint, decides)
        self.tokens_per_byte = None if text.tokenizer.unit == "byte" else len(text) / text.bytes
        self.text = sample(text, tokens)

    def preflight(self, trainer: Trainer) -> None:
        self.score(trainer, most=2 * trainer.recipe.evaluation_reading().segment + 1)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 or trainer.finished:
            # Raises an error before weights that are not finite are scored.
            trainer.settle()
            trainer.announce(self.score(trainer))

    def score(self, trainer: Trainer, most: int | None = None) -> Validation:
        """The score of the sample, or of its first `most` tokens."""
        recipe, text = trainer.recipe, self.text.excerpt(0, most)
        rows = max(recipe.evaluation.streams, trainer.streams.batch)
        streams = max(1, min(rows, (len(text.ids) - 1) // recipe.training_reading(trainer.step).segment))
        reading, documents = recipe.evaluation_reading(), recipe.data.documents
        products = trainer.work.products  # `score` turns its caller's autocast off
        with trainer.evaluation_model() as model:
            if not model.predicts_next:
                with trainer.work.autocast():
                    loss = training_loss(model, text, reading, rows, documents=documents)
                return Validation(trainer.step, len(text.ids), trainer.processes.share(loss))
            found = score(
                model, text, reading, method="stream", streams=streams, documents=documents, precision=products
            )
        bits_per_byte = self.tokens_per_byte and found.bits * self.tokens_per_byte
        return Validation(
            trainer.step, found.scored, trainer.processes.share(found.nats), trainer.processes.share(bits_per_byte)
        )

    def facts(self) -> dict[str, Any]:
        return self.source.facts()

    def restore(self, facts: dict[str, Any]) -> None:
        self.source.check(facts)


@torch.no_grad()
def training_loss(model: LanguageModel, text: Excerpt, reading: Reading, rows: int, *, documents: bool) -> float:
    """The mean training loss over the complete segments of a text, with the same random choices in every call."""
    segment = min(reading.segment, len(text.ids))
    count = len(text.ids) // segment
    device = next(model.parameters()).device
    tokens = torch.from_numpy(text.ids[: count * segment].astype(np.int64)).view(count, segment).to(device)
    starts = torch.zeros(count * segment, dtype=torch.bool)
    starts[torch.from_numpy(text.starts[text.starts < len(starts)])] = True
    starts = starts.view(count, segment).to(device)
    torch.manual_seed(0)
    total = 0.0
    for part in torch.arange(count).split(rows):
        state = model.initial_state(len(part), reading)
        loss, _ = model.training_loss(tokens[part], tokens[part], state, 1.0, starts[part] if documents else None)
        total += len(part) * float(loss)
    return total / count


def sample(text: Encoded, tokens: int | None) -> Excerpt:
    """About `tokens` tokens of a text in evenly spaced pieces, and the offsets at which documents and pieces start."""
    if tokens is None or tokens >= len(text):
        return text.excerpt()
    size = max(2, tokens // PIECES)
    places = np.linspace(0, len(text) - size, max(1, tokens // size)).astype(np.int64)
    at = (places[:, None] + np.arange(size)).ravel()
    starts = np.isin(at, text.starts)
    starts[::size] = True
    return Excerpt(text.ids[at], np.flatnonzero(starts))
