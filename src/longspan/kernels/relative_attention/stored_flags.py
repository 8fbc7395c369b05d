"""The order of programs of one launch that wait for each other: tickets and counters in global memory."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_slide import GATHER

ACQUIRE = tl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
PATIENCE = tl.constexpr(1 << 20)
"""Polls before a program gives up, about a second: a wait without an end would block the device."""


@triton.jit
def take_ticket(tickets, cells, lag, producers, readers):
    """The cell of this program and its role: a producer if less than `producers`, else a reader; -1 for nothing.

    The order: the producers of the first `lag` cells; then in turn the producers of a cell and the readers of the cell
    `lag` before it; then the readers of the last `lag` cells.
    """
    ticket = tl.atomic_add(tickets, 1, sem="relaxed")
    both = producers + readers
    later = ticket - lag * producers
    last = later - (cells - lag) * both
    role = later % both
    cell = later // both + tl.where(role < producers, lag, 0)
    if later < 0:
        cell = ticket // producers
        role = ticket % producers
    elif last >= 0:
        cell = cells - lag + last // readers
        role = producers + last % readers
    if ticket >= cells * both:  # another program has given up
        cell = 0
        role = -1
    return cell, role


@triton.jit
def poll(flag, SLIDE: tl.constexpr):
    """The value of a counter; what was written before it was counted is visible after this."""
    if SLIDE == GATHER:
        found = tl.atomic_add(flag, 0, sem="acquire")
    else:
        # Every thread loads it: no exchange through shared memory, and no atomic operation.
        found = tl.inline_asm_elementwise(ACQUIRE, "=r,l", [flag.to(tl.int64)], tl.int32, False, 1)
    return found


@triton.jit
def wait_until(flag, wanted, tickets, result, SLIDE: tl.constexpr):
    """Wait until `wanted` programs have counted themselves. A program that gives up writes NaN to `result`, and those
    that have no ticket yet do nothing. Returns zero, which the compiler does not know: it cannot move a load before
    this if its address depends on the zero."""
    polls = 0
    found = poll(flag, SLIDE)
    while (found < wanted) & (polls < PATIENCE):
        found = poll(flag, SLIDE)
        polls += 1
    if polls == PATIENCE:
        tl.atomic_max(tickets, 1 << 30)
        tl.atomic_add(result, float("nan"))
    tl.debug_barrier()
    return found >> 31


@triton.jit
def count_one(flag):
    """Count this program, after everything that it has written."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release")
