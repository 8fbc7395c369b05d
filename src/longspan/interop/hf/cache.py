"""StateCache: the `past_key_values` of a longspan model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from longspan.contract import State
from longspan.errors import StateError
from longspan.shapes import Int, Tensor


@dataclass(frozen=True)
class SplitState:
    """The states of a batch whose rows cannot be joined in one state. `compressive` is such a family: it compresses a
    block at the same step in all rows of a state, so rows of unequal lengths need states of their own."""

    parts: tuple[State, ...]
    index: tuple[Int[Tensor, "..."], ...]
    """Which rows of the batch each part has."""

    @property
    def batch(self) -> int:
        return sum(len(rows) for rows in self.index)

    @property
    def device(self) -> torch.device:
        return self.index[0].device

    def rows(self, index: Int[Tensor, "B"]) -> "SplitState":
        """Some rows in the given order, as in a State. Parts that have none of them are left out."""
        parts, found = [], []
        for part, own in zip(self.parts, self.index, strict=True):
            same = index[:, None] == own
            chosen = same.any(dim=1).nonzero()[:, 0]
            if len(chosen):
                parts.append(part.rows(same[chosen].int().argmax(dim=1)))
                found.append(chosen)
        return SplitState(tuple(parts), tuple(found))


class StateCache:
    """A mutable wrapper of an immutable `State`, as `generate` expects: every forward pass replaces the state in it."""

    is_compileable = False

    def __init__(self, state: State | SplitState, seen: int = 0) -> None:
        self.state, self.seen = state, seen
        """`seen` counts the columns of `input_ids` that were read, padding included."""

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (the signature of `transformers`)
        return self.seen

    def copy(self) -> "StateCache":
        """A cache that later forward passes with this one do not change. It shares the tensors."""
        return StateCache(self.state, self.seen)

    def reorder_cache(self, beam_idx: Int[Tensor, "B"]) -> None:
        device = self.state.device if isinstance(self.state, SplitState) else self.state.length.device
        self.state = self.state.rows(beam_idx.to(device))

    def batch_select_indices(self, indices: Int[Tensor, "B"]) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.state.batch).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        raise StateError(
            f"crop({max_length}) is not possible: a longspan state cannot forget its last tokens; keep a copy() of "
            "the cache from before them, and generate without an assistant model or prompt lookup"
        )


def merge_rows(states: Sequence[State], rows: Sequence[Int[Tensor, "..."]]) -> State:
    """One state with the rows of several; row i of `states[k]` becomes row `rows[k][i]`.

    The caches of a stream grow until they are full, so those of the states may have different sizes. The valid
    positions are at the end of a cache, so shorter ones are filled up with zeros at the front.
    """
    order = torch.cat(list(rows)).argsort()
    each = [_tensors(state) for state in states]
    joined = iter([torch.cat(_same_size(tensors))[order] for tensors in zip(*each, strict=True)])
    equal = all(all(a.shape[1:] == b.shape[1:] for a, b in zip(each[0], other, strict=True)) for other in each)
    full = equal and all(state.full for state in states)
    return replace(states[0].map(lambda _: next(joined)), full=full, shared=())


def _tensors(state: State) -> list[Tensor]:
    """The tensors of a state in the order of `State.map`."""
    found: list[Any] = []
    state.map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _same_size(tensors: Sequence[Tensor]) -> list[Tensor]:
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]

    def fill(tensor: Tensor) -> Tensor:
        front = [(size - own, 0) for size, own in zip(sizes, tensor.shape[1:], strict=True)]
        return F.pad(tensor, [n for missing, _ in reversed(front) for n in (missing, 0)])

    return [fill(tensor) for tensor in tensors]
