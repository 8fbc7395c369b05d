"""Two forms of one memory: hidden states, through which Wk and Wv are still trained, or projected keys and values."""

from collections.abc import Callable
from typing import Any

import torch

from longspan.contract import State
from longspan.errors import StateError
from longspan.shapes import Tensor

Kept = list[tuple[str, Tensor, Tensor, int]]
"""What goes into memory: its name, memory and segment together, the segment alone, and the axis of positions."""


def empty_memory(
    like: Tensor, batch: int, layers: int, width: int, heads: int, head_size: int, *, projected: bool
) -> dict[str, tuple[Tensor, ...]]:
    """The parts of a state of which nothing has been read."""
    if projected:
        empty = like.new_zeros(batch, heads, 0, head_size)
        return {"keys": (empty,) * layers, "values": (empty,) * layers}
    return {"hidden": (like.new_zeros(batch, 0, width),) * layers}


def memory_form(state: State, layers: int) -> tuple[Callable[..., tuple[Tensor, Tensor, Kept]], list[int]]:
    """How a layer's keys and values are made from the form of memory this state holds, and how much each layer has."""
    names, counts = set(state.parts), {len(part) for part in state.parts.values()}
    if counts != {layers} or names not in ({"hidden"}, {"keys", "values"}):
        raise StateError(
            f"this state holds {sorted(names)} of {sorted(counts)} layers; "
            f"this model of {layers} layers needs 'hidden', or 'keys' and 'values'"
        )

    def from_hidden(layer: Any, h: Tensor, n: int) -> tuple[Tensor, Tensor, Kept]:
        context = torch.cat([state.parts["hidden"][n].to(h.dtype), h], dim=1)
        return *layer.keys_values(context), [("hidden", context, h, 1)]

    def from_projected(layer: Any, h: Tensor, n: int) -> tuple[Tensor, Tensor, Kept]:
        new_keys, new_values = layer.keys_values(h)
        keys = torch.cat([state.parts["keys"][n].to(new_keys.dtype), new_keys], dim=2)
        values = torch.cat([state.parts["values"][n].to(new_values.dtype), new_values], dim=2)
        return keys, values, [("keys", keys, new_keys, 2), ("values", values, new_values, 2)]

    if names == {"hidden"}:
        return from_hidden, [memory.shape[1] for memory in state.parts["hidden"]]
    return from_projected, [memory.shape[2] for memory in state.parts["keys"]]
