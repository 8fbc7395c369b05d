"""A memory whose oldest positions are compressed instead of dropped, `rate` of them into one slot.

The slots of a row are [compressed; memory], oldest first, with the valid ones last. A block of `rate` positions is
compressed or dropped as a unit, and positions leave the memory only when it is full. So one count of valid slots per
row is enough, as in a plain memory.
"""

from typing import NamedTuple

from longspan.shapes import Float, Int, Tensor


class CompressedCache(NamedTuple):
    """Hidden states, also for decoding, because positions that leave the memory are compressed from them."""

    compressed: Float[Tensor, "B S E"]
    hidden: Float[Tensor, "B M E"]

    @property
    def positions(self) -> int:
        return self.compressed.shape[1] + self.hidden.shape[1]


def evicted_positions(positions: int, capacity: int, rate: int) -> int:
    """How many of the oldest positions leave a memory: complete blocks only."""
    return max(positions - capacity, 0) // rate * rate


def valid_slots(
    valid: Int[Tensor, "B"], positions: int, evicted: int, rate: int, *, selected: bool = False
) -> Int[Tensor, "B"]:
    """How many slots of the `evicted` oldest positions belong to the current document only.

    `valid` counts the valid positions at the end of `positions`. A block that contains a document start is dropped.
    With `selected`, slots are single positions and count separately.
    """
    old = (valid - (positions - evicted)).clamp(min=0, max=evicted)
    return old.clamp(max=evicted // rate) if selected else old // rate


def slots_after(
    valid: Int[Tensor, "B"], positions: int, evicted: int, new: Int[Tensor, "B"], capacity: int
) -> Int[Tensor, "B"]:
    """Valid slots per row after `evicted` positions were compressed to slots of which `new` are valid.

    `valid` counts over [compressed; memory; segment], of which memory and segment are `positions` long; `capacity` is
    the size of the compressed memory.
    """
    before = (valid - positions).clamp(min=0)
    return valid.clamp(max=positions - evicted) + (before + new).clamp(max=capacity)
