"""Where memory helps: the same text read with several memories, or by two models, side by side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.reading import Reading
from longspan.scoring.running import RunningScore, round_robin
from longspan.text_model import TextModel

ALONE = 64
"""Tokens per segment without memory."""


def with_memory(model: LanguageModel, memory: int) -> Reading:
    """The model's reading with another memory. Without memory, segments of `ALONE` tokens are read one at a time.

    Distances beyond those of the model's reading are clamped, because it was not trained on them.
    """
    reading = model.reading
    if "memory" not in model.settings:
        raise ConfigError(f"{type(model).__name__} has no memory setting; compare two models instead")
    if memory == 0:
        segment = min(reading.segment, ALONE)
        found = replace(reading, memory=0, segment=segment, same_length=False, pointer=0)
    else:
        clamp = reading.clamp
        if memory > reading.memory and "clamp" in model.settings and not clamp:
            clamp = reading.memory - 1 if reading.same_length else reading.memory + reading.segment - 1
        found = replace(reading, memory=memory, clamp=clamp)
    model.check_reading(found)
    return found


@dataclass(frozen=True)
class Gain:
    """Bits saved on bytes `begin` to `end` of a text: those of the first reading minus those of another."""

    begin: int
    end: int
    before: float
    after: float

    @property
    def saved(self) -> float:
        return self.before - self.after


class MemoryComparison:
    """A text and several ways to read it. `read` fills it."""

    def __init__(self, data: bytes, ways: Sequence[tuple[TextModel, Reading]]) -> None:
        if len(ways) < 2:
            raise ConfigError(f"a comparison needs at least 2 models or memory lengths, not {len(ways)}")
        self.same_tokens = len({text.tokenizer.fingerprint for text, _ in ways}) == 1
        self.scores = [
            RunningScore(
                text.model,
                text.tokenizer,
                text.tokenizer.encode(data),
                reading,
                # A model that could have a memory and is read without one reads one segment at a time.
                method="stream" if text.has_memory() else None,
            )
            for text, reading in ways
        ]

    @property
    def total(self) -> int:
        """Bytes to read, all ways together."""
        return sum(int(score.ends[-1]) for score in self.scores)

    def read(self) -> Iterator[int]:
        return round_robin(self.scores)

    def gains(self, other: int) -> NDArray[np.float64]:
        """Bits that reading `other` saves on each token but the first, as far as both were read."""
        first, second = self.scores[0], self.scores[other]
        count = min(first.scored, second.scored)
        return (first.losses[:count].astype(np.float64) - second.losses[:count]) / math.log(2)

    def helped_tokens(self, other: int, count: int) -> list[Gain]:
        """The tokens on which reading `other` saves most. Both need the same tokenizer."""
        if not self.same_tokens:
            raise ConfigError(
                "the models have different tokenizers, so their tokens cannot be compared; compare words instead"
            )
        first, second = self.scores[0], self.scores[other]
        best = np.argsort(-self.gains(other), kind="stable")[:count]
        return [
            Gain(
                int(first.ends[k]),
                int(first.ends[k + 1]),
                float(first.losses[k]) / math.log(2),
                float(second.losses[k]) / math.log(2),
            )
            for k in best
        ]

    def helped_words(self, other: int, count: int) -> list[Gain]:
        """The words on which reading `other` saves most."""
        size = min(self.scores[0].bytes_read, self.scores[other].bytes_read)
        parts = []
        for score in (self.scores[0], self.scores[other]):
            scored = min(int(np.searchsorted(score.ends, size, side="right")) - 1, score.scored)
            parts.append(score.words(max(scored, 0)))
        words = min(len(starts) for starts, _ in parts)
        starts = parts[0][0][:words]
        ends = np.append(starts[1:], size)
        before, after = (nats[:words] / math.log(2) for _, nats in parts)
        best = np.argsort(after - before, kind="stable")[:count]
        return [Gain(int(starts[k]), int(ends[k]), float(before[k]), float(after[k])) for k in best]
