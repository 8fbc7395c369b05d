"""A memory whose oldest positions are not dropped but compressed, `rate` of them into one.

The slots of a row stand in the order [compressed; memory], oldest first, and the valid ones are the last: a block of
`rate` positions is compressed whole or forgotten, and only a full memory lets positions go. So one count per row says
how many slots are valid, as in a plain memory.
"""

from longspan.shapes import Int, Tensor


def leaving(positions: int, capacity: int, rate: int) -> int:
    """How many of the oldest positions leave a memory: whole blocks; fewer than `rate` wait until a block is full."""
    return max(positions - capacity, 0) // rate * rate


def whole_blocks(
    valid: Int[Tensor, "B"], positions: int, gone: int, rate: int, *, chosen: bool = False
) -> Int[Tensor, "B"]:
    """Of the slots made from the `gone` oldest positions, how many are made of this document alone.

    `valid` counts the valid positions at the end of `positions`. A block that a document's beginning cuts through is
    forgotten; where slots are positions that were `chosen`, each stands for itself.
    """
    old = (valid - (positions - gone)).clamp(min=0, max=gone)
    return old.clamp(max=gone // rate) if chosen else old // rate


def slots_after(
    valid: Int[Tensor, "B"], positions: int, gone: int, made: Int[Tensor, "B"], capacity: int
) -> Int[Tensor, "B"]:
    """Valid slots per row once `gone` positions have become compressed slots, `made` of them valid.

    `valid` counts over [compressed; memory; segment], whose last two are `positions` long; `capacity` is that of the
    compressed memory.
    """
    before = (valid - positions).clamp(min=0)
    return valid.clamp(max=positions - gone) + (before + made).clamp(max=capacity)
