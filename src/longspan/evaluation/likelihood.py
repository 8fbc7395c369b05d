"""The likelihood of a text read as a stream, in constant memory.

N tokens give N-1 losses: entry k is token k+1 given the tokens up to k, in nats. Nothing resets inside a document.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError

Ids = NDArray[np.integer]


@dataclass(frozen=True)
class Stretch:
    """Losses of consecutive tokens of one lane; the first is entry `begin` of the text's losses."""

    begin: int
    losses: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Piece:
    """The next segment of every lane, and where its losses belong."""

    tokens: torch.Tensor
    targets: torch.Tensor
    starts: torch.Tensor | None
    begins: list[int]  # of each lane, the entry of its first loss
    valid: list[int]  # of each lane, how many losses count

    def stretches(self, losses: torch.Tensor) -> Iterator[Stretch]:
        values = losses.detach().float().cpu().numpy()
        for lane, (begin, count) in enumerate(zip(self.begins, self.valid, strict=True)):
            if count > 0:
                yield Stretch(begin, values[lane, :count])


def pieces_of(
    model: LanguageModel, ids: Ids, *, segment: int, lanes: int, starts: NDArray[np.int64] | None
) -> Iterator[Piece]:
    """A text cut into `lanes` stretches read side by side, a segment at a time; `starts` are the offsets at which
    documents begin."""
    total = check_text(model, ids)
    check_positive("--segment", segment)
    check_positive("--lanes", lanes)
    if lanes > total:
        raise ConfigError(f"--lanes {lanes} is more than the {total} losses of this text; use fewer lanes")
    begins = np.array([lane * total // lanes for lane in range(lanes + 1)])
    sizes, begins = np.diff(begins), begins[:-1]
    device, longest = next(model.parameters()).device, int(sizes.max())
    for offset in range(0, longest, segment):
        # Lanes differ by one loss at most: a shorter one reads its last token twice and the copy is dropped.
        width = min(segment, longest - offset)
        places = np.minimum(begins[:, None] + offset + np.arange(width), total - 1)
        yield Piece(
            _tensor(ids[places], device),
            _tensor(ids[places + 1], device),
            _begun(places, starts, device),
            (begins + offset).tolist(),
            np.minimum(width, sizes - offset).tolist(),
        )


def stream_losses(
    model: LanguageModel,
    ids: Ids,
    *,
    segment: int,
    lanes: int = 1,
    starts: NDArray[np.int64] | None = None,
) -> Iterator[Stretch]:
    """Every loss of a text, segment by segment, the state carried across, each lane from a fresh one."""
    pieces = pieces_of(model, ids, segment=segment, lanes=lanes, starts=starts)
    state = None
    with model.fixed_weights():
        for piece in pieces:
            with torch.inference_mode():
                state = model.initial_state(lanes) if state is None else state
                losses, state = model.losses(piece.tokens, piece.targets, state, piece.starts)
            yield from piece.stretches(losses)


def slides(model: LanguageModel, asked: bool | None = None) -> bool:
    """Whether a text is scored by a sliding window: as asked, else where a model has no memory to carry along."""
    return not model.has_memory if asked is None else asked


def sliding_losses(
    model: LanguageModel,
    ids: Ids,
    *,
    segment: int,
    batch: int | None = None,
    starts: NDArray[np.int64] | None = None,
) -> Iterator[Stretch]:
    """Every loss with exactly `segment` tokens before it (as many as there are near the beginning), from a fresh state.

    The way a model without memory is evaluated at its best: one window per token, only the last position scored. No
    window sees beyond its document's beginning.
    """
    total = check_text(model, ids)
    check_positive("--segment", segment)
    device = next(model.parameters()).device
    batch = batch or max(1, (65536 if device.type == "cuda" else 8192) // segment)  # a GPU waits for small ones
    with torch.inference_mode():
        places = np.arange(min(segment, total))[None]
        tokens, targets = _tensor(ids[places], device), _tensor(ids[places + 1], device)
        losses, _ = model.losses(tokens, targets, model.initial_state(1), _begun(places, starts, device))
    yield Stretch(0, losses[0].float().cpu().numpy())
    with model.fixed_weights():
        for begin in range(segment, total, batch):
            rows = min(batch, total - begin)
            places = begin - segment + 1 + np.arange(rows)[:, None] + np.arange(segment)
            tokens, targets = _tensor(ids[places], device), _tensor(ids[places[:, -1] + 1], device)
            with torch.inference_mode():
                state = model.initial_state(rows)
                losses, _ = model.next_losses(tokens, targets, state, _begun(places, starts, device))
            yield Stretch(begin, losses.float().cpu().numpy())


def check_text(model: LanguageModel, ids: Ids) -> int:
    """The number of losses of a text this model can read."""
    if len(ids) < 2:
        raise DataError(f"the text has {len(ids)} tokens; a score needs at least 2")
    vocabulary = model.config.vocabulary
    if np.iinfo(ids.dtype).max >= vocabulary:
        largest = max(int(ids[i : i + 1_000_000].max()) for i in range(0, len(ids), 1_000_000))
        if largest >= vocabulary:
            raise DataError(f"the text holds token {largest}; this model knows 0 to {vocabulary - 1}")
    return len(ids) - 1


def _tensor(ids: Ids, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def _begun(places: NDArray[np.int64], starts: NDArray[np.int64] | None, device: torch.device) -> torch.Tensor | None:
    """Which places begin a document: `starts` is ordered, and may be long."""
    if starts is None or not len(starts):
        return None
    found = np.minimum(np.searchsorted(starts, places), len(starts) - 1)
    return torch.from_numpy(starts[found] == places).to(device)


def check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} {value} must be at least 1")


def check_temperature(value: float) -> None:
    if not 0.01 <= value <= 100:
        raise ConfigError(f"--temp {value} must lie between 0.01 and 100; 1 leaves the scores as they are")


class Tally:
    """A running sum of losses, in float64; also written in place of their entries where an array is given."""

    def __init__(self, out: NDArray[np.float32] | None = None) -> None:
        self.out, self.count, self.nats = out, 0, 0.0

    def add(self, stretch: Stretch) -> None:
        self.count += len(stretch.losses)
        self.nats += float(stretch.losses.sum(dtype=np.float64))
        if self.out is not None:
            self.out[stretch.begin : stretch.begin + len(stretch.losses)] = stretch.losses

    @property
    def mean(self) -> float:
        return self.nats / self.count

    @property
    def bits(self) -> float:
        return self.mean / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean) if self.mean < 700 else math.inf


class Pace:
    """How fast a text is read once all is warm, to be told after every segment how many tokens were scored so far.

    The first `warm_up` segments are left out: they load and compile kernels, record graphs and fill the memory, which
    on a GPU can take longer than to read a few million tokens. So is the last, which may be shorter. A text of too few
    segments for that is timed as a whole.
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
        """All of it."""
        return self.last[1] - self.first[1]

    @property
    def tokens_per_second(self) -> float:
        enough = self.segments > self.warm_up + 1
        (count, began), (scored, ended) = (self.warm, self.before_last) if enough else (self.first, self.last)
        return (scored - count) / max(ended - began, 1e-9)


def warm_up(model: LanguageModel, segment: int) -> int:
    """Segments until a state has the shapes of a full one, and three more: graphs are recorded after that."""
    return -(-model.tokens_to_fill // segment) + 3
