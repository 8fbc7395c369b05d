"""The likelihood of a text read as a stream, in constant memory.

N tokens give N-1 losses: entry k is token k+1 given the tokens up to k, in nats. Nothing resets inside a document.
"""

import math
from collections.abc import Iterator
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


def stream_losses(
    model: LanguageModel,
    ids: Ids,
    *,
    segment: int,
    lanes: int = 1,
    starts: NDArray[np.int64] | None = None,
) -> Iterator[Stretch]:
    """Every loss of a text, segment by segment, the state carried across.

    `lanes` cuts the text into that many stretches read side by side, each from a fresh state; `starts` are the
    offsets at which documents begin, where memory is forgotten.
    """
    total = check_text(model, ids)
    check_positive("--segment", segment)
    check_positive("--lanes", lanes)
    if lanes > total:
        raise ConfigError(f"--lanes {lanes} is more than the {total} losses of this text; use fewer lanes")
    begins = np.array([lane * total // lanes for lane in range(lanes + 1)])
    sizes, begins = np.diff(begins), begins[:-1]
    device = next(model.parameters()).device
    state = model.initial_state(lanes)
    for offset in range(0, int(sizes.max()), segment):
        width = min(segment, int(sizes.max()) - offset)
        # Lanes differ by one loss at most: a shorter one reads its last token twice and the copy is dropped.
        places = np.minimum(begins[:, None] + offset + np.arange(width), total - 1)
        tokens = torch.from_numpy(ids[places].astype(np.int64)).to(device)
        targets = torch.from_numpy(ids[places + 1].astype(np.int64)).to(device)
        begin_here = None if starts is None else torch.from_numpy(_among(places, starts)).to(device)
        with torch.inference_mode():
            losses, state = model.losses(tokens, targets, state, begin_here)
        values = losses.float().cpu().numpy()
        for lane in range(lanes):
            valid = min(width, int(sizes[lane]) - offset)
            if valid > 0:
                yield Stretch(int(begins[lane]) + offset, values[lane, :valid])


def sliding_losses(model: LanguageModel, ids: Ids, *, segment: int, batch: int | None = None) -> Iterator[Stretch]:
    """Every loss with exactly `segment` tokens before it (as many as there are near the beginning), from a fresh state.

    The way a model without memory is evaluated at its best: one window per token, only the last position scored.
    """
    total = check_text(model, ids)
    check_positive("--segment", segment)
    device = next(model.parameters()).device
    batch = batch or max(1, 8192 // segment)
    with torch.inference_mode():
        head = torch.from_numpy(ids[: min(segment, total) + 1].astype(np.int64)).to(device)[None]
        losses, _ = model.losses(head[:, :-1], head[:, 1:], model.initial_state(1))
    yield Stretch(0, losses[0].float().cpu().numpy())
    for begin in range(segment, total, batch):
        rows = min(batch, total - begin)
        places = begin - segment + 1 + np.arange(rows)[:, None] + np.arange(segment)
        tokens = torch.from_numpy(ids[places].astype(np.int64)).to(device)
        targets = torch.from_numpy(ids[places[:, -1:] + 1].astype(np.int64)).to(device)
        with torch.inference_mode():
            hidden, _ = model.hidden_states(tokens, model.initial_state(rows))
            losses = model.head.losses(hidden[-1][:, -1:], targets)
        yield Stretch(begin, losses[:, 0].float().cpu().numpy())


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


def _among(places: NDArray[np.int64], ordered: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which places are in an ordered list, in time that does not grow with the list."""
    found = np.searchsorted(ordered, places)
    return np.append(ordered, -1)[found] == places


def check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} {value} must be at least 1")


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
