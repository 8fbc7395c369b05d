"""Per-token losses of a text, in constant memory: as a stream, or with a sliding window.

N tokens have N - 1 losses: entry k is the loss of token k + 1 given the tokens up to k, in nats.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError, counted
from longspan.reading import Reading

Ids = NDArray[np.integer]
Starts = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with tokens processed so far and tokens in total."""


@dataclass(frozen=True)
class Chunk:
    """Losses of consecutive tokens; the first is entry `begin` of the text's losses."""

    begin: int
    losses: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Segment:
    """The next segment of every stream, and where its losses go."""

    tokens: torch.Tensor
    targets: torch.Tensor
    starts: torch.Tensor | None
    begins: list[int]
    """The entry of the first loss, per stream."""
    valid: list[int]
    """How many losses count, per stream."""

    def chunks(self, losses: torch.Tensor) -> Iterator[Chunk]:
        values = losses.detach().float().cpu().numpy()
        for row, (begin, count) in enumerate(zip(self.begins, self.valid, strict=True)):
            if count > 0:
                yield Chunk(begin, values[row, :count])


class Arriving:
    """Losses of a segment on their way from the device, which can run the next segment in the meantime."""

    def __init__(self, segment: Segment, losses: torch.Tensor) -> None:
        self.segment, self.losses = segment, losses.detach().float().to("cpu", non_blocking=True)
        self.arrived = torch.cuda.Event() if losses.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def chunks(self) -> Iterator[Chunk]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.segment.chunks(self.losses)


def segments_of(
    model: LanguageModel, ids: Ids, *, segment: int, streams: int = 1, starts: Starts | None = None
) -> Iterator[Segment]:
    """A text cut into `streams` equal parts that are read in parallel, one segment at a time. `starts` are the offsets
    of document starts."""
    total = check_text(model, ids)
    if not 1 <= streams <= total:
        raise ConfigError(f"streams={streams} must be between 1 and {total}, the number of losses of this text")
    begins = np.array([stream * total // streams for stream in range(streams + 1)])
    sizes, begins = np.diff(begins), begins[:-1]
    device, longest = next(model.parameters()).device, int(sizes.max())
    for offset in range(0, longest, segment):
        # Streams differ by one loss at most: a shorter one repeats its last token, and the copy does not count.
        width = min(segment, longest - offset)
        positions = np.minimum(begins[:, None] + offset + np.arange(width), total - 1)
        yield Segment(
            _tensor(ids[positions], device),
            _tensor(ids[positions + 1], device),
            _starts_at(positions, starts, device),
            (begins + offset).tolist(),
            np.minimum(width, sizes - offset).tolist(),
        )


def stream_losses(
    model: LanguageModel, ids: Ids, reading: Reading, *, streams: int = 1, starts: Starts | None = None
) -> Iterator[Chunk]:
    """Every loss of a text, read segment by segment with the state carried over; each stream starts empty."""
    state = None
    for piece in segments_of(model, ids, segment=reading.segment, streams=streams, starts=starts):
        with torch.inference_mode():
            state = model.initial_state(streams, reading, trainable=False) if state is None else state
            losses, state = model.losses(piece.tokens, piece.targets, state, piece.starts)
        yield from piece.chunks(losses)


def sliding_losses(
    model: LanguageModel,
    ids: Ids,
    reading: Reading,
    *,
    stride: int = 1,
    batch: int | None = None,
    starts: Starts | None = None,
) -> Iterator[Chunk]:
    """Every loss from a window of `reading.segment` tokens and an empty state, of which the last `stride` are scored;
    of the first window, all.

    One window per token is the best evaluation of a model without memory: every loss has `segment` tokens before it.
    With a longer stride it has at least segment - stride + 1, and the work is `stride` times less. The last window ends
    with the text. No window crosses the start of its document.
    """
    total, segment = check_text(model, ids), reading.segment
    check_stride(stride, reading)
    device = next(model.parameters()).device
    batch = batch or _windows_at_once(device, segment, stride * model.config.vocabulary)
    with torch.inference_mode():
        positions = np.arange(min(segment, total))[None]
        tokens, targets = _tensor(ids[positions], device), _tensor(ids[positions + 1], device)
        state = model.initial_state(1, reading, trainable=False)
        losses, _ = model.losses(tokens, targets, state, _starts_at(positions, starts, device))
    yield Chunk(0, losses[0].float().cpu().numpy())
    for begin in range(segment, total, batch * stride):
        ends = np.minimum(np.arange(begin, min(begin + batch * stride, total), stride) + stride, total)
        positions = ends[:, None] - segment + np.arange(segment)
        tokens, targets = _tensor(ids[positions], device), _tensor(ids[positions[:, -stride:] + 1], device)
        with torch.inference_mode():
            state = model.initial_state(len(ends), reading, trainable=False)
            losses, _ = model.losses(tokens, targets, state, _starts_at(positions, starts, device), last=stride)
        values = losses.float().cpu().numpy()
        new = int(ends[-1]) - begin - (len(ends) - 1) * stride  # of the last window, which may overlap more
        yield Chunk(begin, np.concatenate([values[:-1].ravel(), values[-1, -new:]]))


def check_stride(stride: int, reading: Reading) -> None:
    if not 1 <= stride <= reading.segment:
        raise ConfigError(f"stride={stride} must be between 1 and {reading.segment}, the tokens of a window")


def _windows_at_once(device: torch.device, segment: int, logits: int) -> int:
    """How many windows of `segment` tokens and so many logits are read together."""
    tokens, most = (65536, 2**30) if device.type == "cuda" else (8192, 2**26)
    return max(1, min(tokens // segment, most // logits))


def check_text(model: LanguageModel, ids: Ids) -> int:
    """The number of losses of a text. Refuses a text that is too short or has tokens outside the vocabulary."""
    if len(ids) < 2:
        raise DataError(f"the text has {counted(len(ids), 'token')}; scoring needs at least 2")
    vocabulary = model.config.vocabulary
    if np.iinfo(ids.dtype).max >= vocabulary:
        largest = max(int(ids[i : i + 1_000_000].max()) for i in range(0, len(ids), 1_000_000))
        if largest >= vocabulary:
            raise DataError(
                f"the text has token {largest}, but this model's tokens are 0 to {vocabulary - 1}; use the model's "
                "own tokenizer"
            )
    return len(ids) - 1


def _tensor(ids: Ids, device: torch.device) -> torch.Tensor:
    return _send(torch.from_numpy(ids.astype(np.int64)), device)


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned memory is copied without waiting for the work that the device still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _starts_at(positions: NDArray[np.int64], starts: Starts | None, device: torch.device) -> torch.Tensor | None:
    """Which positions start a document; `starts` is sorted and may be long."""
    if starts is None or not len(starts):
        return None
    found = np.minimum(np.searchsorted(starts, positions), len(starts) - 1)
    return _send(torch.from_numpy(starts[found] == positions), device)
