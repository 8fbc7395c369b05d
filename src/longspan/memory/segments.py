"""Memory of earlier segments: positions kept at the end of a buffer, with a count of the valid ones per row."""

from dataclasses import replace

import torch

from longspan.contract import State
from longspan.shapes import Bool, Int, Tensor


def first_visible(
    length: Int[Tensor, "B"], remembered: int, tokens: int, starts: Bool[Tensor, "B T"] | None
) -> Int[Tensor, "B T"]:
    """Among the keys [memory; segment], the oldest that each query may see.

    A row whose memory is not full sees only its valid end; from a document's first token on, nothing before it.
    """
    first = (remembered - length)[:, None].expand(-1, tokens)
    if starts is None:
        return first
    place = torch.arange(remembered, remembered + tokens, device=length.device)
    return torch.maximum(first, torch.where(starts, place, 0).cummax(dim=1).values)


def remaining(first: Int[Tensor, "B T"], remembered: int, capacity: int) -> Int[Tensor, "B"]:
    """Valid positions per row once the segment has been read."""
    return (remembered + first.shape[1] - first[:, -1]).clamp(max=capacity)


def keep_last(memory_and_segment: Tensor, segment: Tensor, capacity: int, axis: int) -> Tensor:
    """The last `capacity` positions, without gradient; a view, so the next segment's copy is the only one.

    Where the segment alone fills the memory it is kept alone: the longer buffer can then be freed, and a memory of the
    segment's length is that segment, with the same strides at every step (a compiled step is not compiled again).
    """
    source = segment if segment.shape[axis] >= capacity else memory_and_segment
    count = source.shape[axis]
    kept = min(capacity, count)
    return source.detach().narrow(axis, count - kept, kept)


def trim(state: State, capacity: int) -> State:
    """A state that was made with a longer memory, cut to its last `capacity` positions."""
    if all(tensor.shape[-2] <= capacity for part in state.parts.values() for tensor in part):
        return state
    parts = {
        name: tuple(tensor[..., max(tensor.shape[-2] - capacity, 0) :, :] for tensor in tensors)
        for name, tensors in state.parts.items()
    }
    return replace(state, length=state.length.clamp(max=capacity), parts=parts)
