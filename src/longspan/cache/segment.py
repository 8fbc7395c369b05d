"""Which cached positions and tokens of a segment each query sees, and the state after the segment."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from longspan.cache.window import TokenWindow
from longspan.contract import LanguageModel, State
from longspan.errors import StateError
from longspan.segments import check_rows
from longspan.shapes import Bool, Int, Tensor


class SegmentMask(NamedTuple):
    """Visibility among the keys [cached positions; segment] of one segment. Query i is key `cached + i`."""

    cached: int
    tokens: int
    memory: int
    """Positions to keep for the next segment."""
    window: int | None
    """Only distances below this are visible."""
    first_key: Int[Tensor, "B T"] | None
    """The oldest key visible to each query; None if all keys are valid and no document starts in the segment."""
    starts: Bool[Tensor, "B T"] | None
    discount: float = 0.0

    @classmethod
    def of(cls, state: State, cached: int, tokens: int, starts: Bool[Tensor, "B T"] | None) -> "SegmentMask":
        reading = state.reading
        # `starts` first: with documents, a compiled step must not depend on `full`.
        first = None if starts is None and state.full else first_keys(state.length, cached, tokens, starts)
        return cls(cached, tokens, reading.memory, reading.window, first, starts, reading.discount)

    @property
    def keys(self) -> int:
        return self.cached + self.tokens

    def distances(self, clamp: int = 0) -> int:
        """The number of distances that need a position key: at most the keys, the window and the clamp."""
        return min(self.keys, self.window or self.keys, clamp + 1 if clamp else self.keys)

    def at(self, cached: int, memory: int) -> "SegmentMask":
        """The same mask for a layer that has cached `cached` positions and keeps `memory`."""
        first = self.first_key
        if first is not None and cached != self.cached:
            first = (first - (self.cached - cached)).clamp(min=0)
        return self._replace(cached=cached, memory=memory, first_key=first)


def first_keys(
    length: Int[Tensor, "B"], cached: int, tokens: int, starts: Bool[Tensor, "B T"] | None
) -> Int[Tensor, "B T"]:
    """The oldest visible key of each query: the first valid cached position, or its document's first token."""
    first = (cached - length.clamp(max=cached))[:, None].expand(-1, tokens)
    if starts is None:
        return first
    position = torch.arange(cached, cached + tokens, device=length.device)
    return torch.maximum(first, torch.where(starts, position, 0).cummax(dim=1).values)


def open_state(model: LanguageModel, tokens: Int[Tensor, "B T"], state: State | None, *types: type) -> State:
    """The state that a segment continues from: the given one, or an initial one if none is given.

    The given one must have one cache of these types per layer. Caches of other types may follow (a pointer's).
    """
    if state is None:
        return model.initial_state(tokens.shape[0])
    check_rows(tokens, state.batch)
    if state.caches and isinstance(state.caches[0], TokenWindow):
        return without_window(model, state)
    layers: Any = model.layers
    own, others = state.caches[: len(layers)], state.caches[len(layers) :]
    fits = len(own) == len(layers) and all(isinstance(cache, types) for cache in own)
    if not fits or any(isinstance(cache, types) for cache in others):
        raise StateError(
            f"this state has {len(state.caches)} caches of type {sorted({type(c).__name__ for c in state.caches})}; a "
            f"model of {len(layers)} layers needs {' or '.join(t.__name__ for t in types)} for each"
        )
    return state


def without_window(model: LanguageModel, state: State) -> State:
    """An empty state in place of that of a WindowDecoder: without memory, a model reads every segment on its own.

    A StateError if the model would need the tokens of the window, or if the caches are of another kind.
    """
    if not all(isinstance(cache, TokenWindow) for cache in state.caches):
        raise StateError(
            f"this state has caches of type {sorted({type(c).__name__ for c in state.caches})}, but the model "
            "has no memory; use a state that this model returned"
        )
    if model.has_memory(state.reading):
        raise StateError(
            f"this state is a window of {state.caches[0].positions} tokens from a decoder without memory, but "
            f"memory={state.reading.memory}; read these tokens again to use a memory"
        )
    return model.initial_state(state.batch, state.reading)


def next_state(
    state: State, mask: SegmentMask, caches: tuple[Any, ...], limit: int, shared: tuple[Tensor, ...] = ()
) -> State:
    """The state after a segment: at most `limit` positions stay valid, and none before the last document start."""
    if mask.first_key is None:
        length = state.length + mask.tokens
    else:
        length = mask.keys - mask.first_key[:, -1]
    full = mask.starts is None and (state.full or limit <= mask.tokens)
    return replace(state, caches=caches, length=length.clamp(max=limit), full=full, shared=shared)
