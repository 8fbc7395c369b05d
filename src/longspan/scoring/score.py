"""The score of a text: one function for training, the command line and the public API."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.config import convert
from longspan.contract import LanguageModel
from longspan.data.encoded import Encoded, Excerpt
from longspan.errors import ConfigError
from longspan.reading import Reading
from longspan.scoring.dynamic import Dynamics, dynamic_losses
from longspan.scoring.losses import Chunk, Ids, Progress, Starts, check_text, sliding_losses, stream_losses

Method = Literal["stream", "sliding", "dynamic"]


@dataclass(frozen=True, eq=False)
class Score:
    """The mean loss of a text, and how it was measured."""

    scored: int
    """Tokens with a loss: all but the first."""
    nats: float
    method: Method
    reading: Reading
    streams: int
    seconds: float
    tokens_per_second: float
    """Excludes warm-up if the text is long enough."""
    bytes: int | None = None
    """The bytes of the text, or of the tokens if they are bytes. None if only token ids were given."""
    words: int | None = None
    """The words of the text, separated by whitespace."""
    losses: NDArray[np.float32] | None = None
    """`losses[k]` is the loss of token k + 1 given the tokens up to k, in nats. None unless requested."""
    stride: int = 1
    """Tokens that are scored per sliding window."""

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        return _exp(self.nats)

    @property
    def bits_per_byte(self) -> float:
        """The bits of all tokens divided by the bytes of the text; NaN if these are not known."""
        return self.bits * self.scored / self.bytes if self.bytes else math.nan

    @property
    def perplexity_per_word(self) -> float:
        """exp of the nats of all tokens divided by the words of the text; NaN if there are none."""
        return _exp(self.nats * self.scored / self.words) if self.words else math.nan


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def default_method(model: LanguageModel, reading: Reading | None = None) -> Method:
    """A stream, or a sliding window if the model has no memory."""
    return "stream" if model.has_memory(reading) else "sliding"


def score(
    model: LanguageModel,
    text: Ids | Encoded | Excerpt,
    reading: Reading | None = None,
    *,
    method: Method | None = None,
    streams: int = 1,
    stride: int = 1,
    documents: bool = True,
    losses: NDArray[np.float32] | bool = False,
    dynamics: Dynamics | None = None,
    precision: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Score:
    """Score an encoded text, or token ids of one document.

    The state is reset where a document of an encoded text starts; `documents=False` carries it on.

    `method` is "stream" (state carried from segment to segment), "sliding" (a full window before every token) or
    "dynamic" (a stream whose weights learn from every segment after it was scored; they are restored afterwards).
    `streams` cuts the text into parts that are read in parallel. `stride` is how many tokens are scored per sliding
    window: the more, the faster, with fewer tokens before each.
    `losses` requests every token's loss, or is the array to write them to. `precision` is the dtype of matrix products.
    """
    reading, streams = reading or model.reading, convert(int, streams, "streams")
    model.check_reading(reading)
    method = default_method(model, reading) if method is None else convert(Method, method, "method")
    if streams != 1 and method != "stream":
        raise ConfigError(f"streams={streams} needs method='stream'; use streams=1 with {method!r}")
    stride = convert(int, stride, "stride")
    if stride != 1 and method != "sliding":
        raise ConfigError(f"stride={stride} needs method='sliding'; leave it out with {method!r}")
    ids, starts = (text, None) if isinstance(text, np.ndarray) else (text.ids, _later(text.starts))
    starts = starts if documents else None
    total = check_text(model, ids)
    out = np.empty(total, np.float32) if losses is True else losses if isinstance(losses, np.ndarray) else None
    chunks: Iterator[Chunk]
    if method == "sliding":
        chunks = sliding_losses(model, ids, reading, stride=stride, starts=starts)
    elif method == "dynamic":
        chunks = dynamic_losses(model, ids, reading, starts=starts, dynamics=dynamics, precision=precision)
    else:
        chunks = stream_losses(model, ids, reading, streams=streams, starts=starts)
    nats, scored, pace = 0.0, 0, Pace(warm_up_segments(model, reading))
    device = next(model.parameters()).device.type
    with torch.autocast(device, precision, enabled=precision is not None and method != "dynamic"):
        for count, chunk in enumerate(chunks, start=1):
            nats += float(chunk.losses.sum(dtype=np.float64))
            scored += len(chunk.losses)
            if out is not None:
                out[chunk.begin : chunk.begin + len(chunk.losses)] = chunk.losses
            if count % streams == 0:
                pace.mark(scored)
            if progress is not None:
                progress(scored, total)
    speed = pace.tokens_per_second
    size, words = None, None
    if isinstance(text, Encoded):
        size, words = scored if text.tokenizer.unit == "byte" else text.bytes, text.words
    return Score(scored, nats / scored, method, reading, streams, pace.seconds, speed, size, words, out, stride)


def _later(starts: Starts) -> Starts | None:
    """The starts of all documents but the first, which begins with an empty state. None if there is only one."""
    later = starts[starts > 0]
    return later if len(later) else None


class Pace:
    """Measures speed without warm-up. Call `mark` after every segment with the number of tokens scored so far.

    The first `warm_up` segments do not count: they compile kernels, capture graphs and fill the memory, which on a GPU
    can take longer than scoring millions of tokens. Neither does the last segment, which may be shorter. A text with
    too few segments is timed from its beginning.
    """

    def __init__(self, warm_up: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.warm_up, self.clock, self.segments = warm_up, clock, 0
        self.first = self.warm = self.before_last = self.last = (0, clock())

    def mark(self, scored: int) -> None:
        self.segments += 1
        self.before_last, self.last = self.last, (scored, self.clock())
        if self.segments == self.warm_up:
            self.warm = self.last

    @property
    def seconds(self) -> float:
        return self.last[1] - self.first[1]

    @property
    def tokens_per_second(self) -> float:
        enough = self.segments > self.warm_up + 1
        (count, began), (scored, ended) = (self.warm, self.before_last) if enough else (self.first, self.last)
        return (scored - count) / max(ended - began, 1e-9)


def warm_up_segments(model: LanguageModel, reading: Reading) -> int:
    """Segments until the caches are full, and three more: CUDA graphs are captured after that."""
    full = model.initial_state(1, reading, trainable=False, filled=True)
    positions = max((getattr(cache, "positions", 0) for cache in full.caches), default=0)
    return -(-positions // reading.segment) + 3
