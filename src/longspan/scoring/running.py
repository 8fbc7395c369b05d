"""The score of a text while it is being read: losses so far, a curve, and the most surprising passages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.contract import LanguageModel
from longspan.reading import Reading
from longspan.scoring.losses import Ids, check_text, sliding_losses, stream_losses
from longspan.scoring.score import Method, default_method
from longspan.tokenizers import Tokenizer


@dataclass(frozen=True)
class Passage:
    """Bytes `begin` to `end` of a text and their mean surprisal."""

    begin: int
    end: int
    bits_per_byte: float


class RunningScore:
    """One stream. `read` fills it; what was read can be asked for meanwhile, also by other threads."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        ids: Ids,
        reading: Reading | None = None,
        *,
        method: Method | None = None,
    ) -> None:
        self.model, self.ids, self.reading = model, ids, reading or model.reading
        model.check_reading(self.reading)
        self.method = method or default_method(model, self.reading)
        self.total = check_text(model, ids)
        self.data = tokenizer.decode_bytes(ids)
        """The text as the tokens give it: some tokenizers change white space or unknown words."""
        kinds, places = np.unique(ids, return_inverse=True)
        self.sizes = np.array([len(tokenizer.decode_bytes([token])) for token in kinds], np.int64)[places]
        """Bytes of each token."""
        self.ends = self.sizes.cumsum()
        self.losses = np.full(self.total, np.nan, np.float32)
        """As in `Score`: entry k is the loss of token k + 1, NaN if it was not read yet."""
        self.scored = 0

    def read(self) -> Iterator[int]:
        """Score the text; yields the number of losses so far after every segment."""
        losses = sliding_losses if self.method == "sliding" else stream_losses
        for chunk in losses(self.model, self.ids, self.reading):
            self.losses[chunk.begin : chunk.begin + len(chunk.losses)] = chunk.losses
            self.scored = chunk.begin + len(chunk.losses)
            yield self.scored

    @property
    def bytes_read(self) -> int:
        """Bytes up to the last token with a loss."""
        return int(self.ends[self.scored])

    @property
    def nats(self) -> float:
        return float(self.losses[: self.scored].sum(dtype=np.float64))

    @property
    def bits_per_byte(self) -> float:
        """Bits of the tokens scored so far, divided by their bytes: all but those of the first token."""
        size = self.bytes_read - int(self.sizes[0])
        return self.nats / math.log(2) / size if size else math.nan

    def running_bits(self, points: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Bits per byte from the beginning up to `points` places that are evenly spaced over what was read. The first
        places are left out, where few tokens give large values."""
        scored = self.scored
        if not scored:
            return np.empty(0, np.int64), np.empty(0)
        places = np.unique(np.linspace(min(scored, max(16, scored // 12)), scored, points).astype(np.int64))
        bits = self.losses[:scored].cumsum(dtype=np.float64) / math.log(2)
        return self.ends[places], bits[places - 1] / np.maximum(self.ends[places] - self.sizes[0], 1)

    def curve(self, points: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The surprisal along the text: bits per byte of `points` equal parts of it, and the middle of each in bytes.
        Parts that were not read yet are left out."""
        edges = np.linspace(self.sizes[0], self.ends[-1], min(points, self.total) + 1)
        edges = np.unique(np.searchsorted(self.ends, edges))
        edges = edges[edges <= self.scored]
        if len(edges) < 2:
            return np.empty(0, np.int64), np.empty(0)
        before = np.concatenate([[0.0], self.losses[: self.scored].cumsum(dtype=np.float64)])
        size = np.maximum(np.diff(self.ends[edges]), 1)
        middle = (self.ends[edges[:-1]] + self.ends[edges[1:]]) // 2
        return middle, np.diff(before[edges]) / math.log(2) / size

    def words(self, scored: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The starts of the words in bytes and the nats of each: the sum over the tokens that begin in it."""
        scored = self.scored if scored is None else min(scored, self.scored)
        starts = word_starts(self.data[: int(self.ends[scored])])
        words = np.searchsorted(starts, self.ends[:scored], side="right") - 1
        nats: NDArray[np.float64] = np.zeros(len(starts))
        np.add.at(nats, words, self.losses[:scored])
        return starts, nats

    def passages(self, count: int, length: int = 80) -> list[Passage]:
        """The `count` most surprising passages of about `length` bytes, cut at white space; none overlaps another."""
        if not self.scored:
            return []
        starts, nats = self.words()
        ends = np.append(starts[1:], self.bytes_read)
        before = np.concatenate([[0.0], nats.cumsum()])
        last = np.minimum(np.searchsorted(ends, starts + length), len(ends) - 1)
        size = ends[last] - starts
        bits = (before[last + 1] - before[: len(last)]) / math.log(2) / np.maximum(size, 1)
        bits[size < length // 2] = -1.0  # the end of the text, or of what was read
        found: list[Passage] = []
        for first in np.argsort(-bits):
            begin, end = int(starts[first]), int(ends[last[first]])
            if len(found) == count or bits[first] < 0:
                break
            if all(end <= other.begin or begin >= other.end for other in found):
                found.append(Passage(begin, end, float(bits[first])))
        return found


def word_starts(data: bytes) -> NDArray[np.int64]:
    """Where words start: the white space before a word belongs to it."""
    space = np.isin(np.frombuffer(data, np.uint8), np.frombuffer(b" \t\n\r\v\f", np.uint8))
    starts = np.flatnonzero(space[1:] & ~space[:-1]) + 1
    return np.concatenate([[0], starts]).astype(np.int64)


def round_robin(scores: Sequence[RunningScore]) -> Iterator[int]:
    """Read the same text with several models or readings side by side: the one that is behind goes on. Yields the
    bytes read by all together."""
    running = {index: score.read() for index, score in enumerate(scores)}
    while running:
        behind = min(running, key=lambda index: scores[index].bytes_read * bool(scores[index].scored))
        if next(running[behind], None) is None:
            del running[behind]
            continue
        yield sum(score.bytes_read for score in scores if score.scored)
