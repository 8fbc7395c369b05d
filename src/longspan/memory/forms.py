"""The two forms a memory of earlier positions takes: hidden states, or the keys and values they project to."""

from collections.abc import Mapping
from typing import Any

import torch

from longspan.contract import State
from longspan.errors import StateError
from longspan.memory.segments import keep_last
from longspan.shapes import Float, Tensor


def empty_memory(config: Any, like: Tensor, batch: int, *, projected: bool) -> State:
    """Nothing read yet. Memory holds hidden states while training, since gradients reach Wk and Wv through them; with
    fixed weights it holds projected keys and values, which give the same numbers and are made once."""
    if projected:
        empty = like.new_zeros(batch, config.heads, 0, config.head_size)
        parts = {"keys": (empty,) * config.layers, "values": (empty,) * config.layers}
    else:
        parts = {"hidden": (like.new_zeros(batch, 0, config.width),) * config.layers}
    return State(torch.zeros(batch, dtype=torch.int64, device=like.device), parts, whole=True)


def require_memory(state: State, batch: int, layers: int, taps: int = 0) -> None:
    """A state of as many rows and layers, in one of the two forms, with tails exactly where a convolution has taps."""
    state.require_rows(batch)
    names, counts = set(state.parts), {len(part) for part in state.parts.values()}
    tails = {"tails"} if taps else set()
    if counts != {layers} or names not in ({"hidden"} | tails, {"keys", "values"} | tails):
        raise StateError(
            f"this state holds {sorted(names)} of {sorted(counts)} layers; "
            f"this model of {layers} layers needs 'hidden', or 'keys' and 'values'"
            + (f", and 'tails' for its model.convolution={taps}" if taps else "")
        )
    held = {tail.shape[1] for tail in state.parts.get("tails", ())}
    if not held <= {0, taps}:
        raise StateError(f"this state is of a model.convolution={max(held)} and this model has {taps}; they must agree")


def held(state: State, *, alike: bool = True) -> int:
    """The positions that the layer with most of them holds; where layers are `alike`, all hold as many."""
    parts = [state.parts[name] for name in ("hidden", "keys", "values") if name in state.parts]
    counts = [{part[n].shape[-2] for part in parts} for n in range(len(parts[0]))]
    if any(len(of_layer) > 1 for of_layer in counts) or (alike and len(set().union(*counts)) > 1):
        raise StateError(
            f"this state's layers hold {[sorted(of_layer) for of_layer in counts]!s:.200} positions; they must agree"
        )
    return max(max(of_layer) for of_layer in counts)


def with_memory(
    layer: Any, h: Float[Tensor, "B T E"], memory: Mapping[str, Tensor], capacity: int
) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"], dict[str, Tensor]]:
    """A layer's keys and values of [memory; segment], and the memory after the segment, in the form it had."""
    if "hidden" in memory:
        context = torch.cat([memory["hidden"].to(h.dtype), h], dim=1)
        return *layer.keys_values(context), {"hidden": keep_last(context, h, capacity, 1)}
    new_keys, new_values = layer.keys_values(h)
    keys, values = _after(memory["keys"], new_keys), _after(memory["values"], new_values)
    kept = {"keys": keep_last(keys, new_keys, capacity, 2), "values": keep_last(values, new_values, capacity, 2)}
    return keys, values, kept


def _after(old: Float[Tensor, "B H M D"], new: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H K D"]:
    """[old; new]. On a GPU heads stay side by side, as the projection left them: whole rows are copied, six times as
    fast. A CPU reads each head's keys several times, and does it faster when they lie together."""
    old = old.to(new.dtype)
    if new.is_cuda:
        return torch.cat([old.transpose(1, 2), new.transpose(1, 2)], dim=1).transpose(1, 2)
    return torch.cat([old, new], dim=2)
