"""Kernels that call the functions of stored_flags.py, for its tests."""

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_slide import GATHER
from longspan.kernels.relative_attention.stored_flags import take_ticket, wait_until


@triton.jit
def tickets_kernel(flags, found, cells, lag, producers, readers):
    """Write the cell and the role of every program, in the order of the tickets."""
    ticket = tl.load(flags)
    cell, role = take_ticket(flags, cells, lag, producers, readers)
    tl.store(found + 2 * ticket, cell)
    tl.store(found + 2 * ticket + 1, role)


@triton.jit
def waiting_kernel(flags, result, wanted):
    wait_until(flags + 1, wanted, flags, result, GATHER)
