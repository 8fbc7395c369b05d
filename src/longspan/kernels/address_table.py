"""Tables of addresses on the device, so that one kernel can work on many tensors. Imports Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from longspan.shapes import Int, Tensor

MOST_ADDRESSES = 64
"""Per launch: the arguments of a kernel are limited to 4 KB."""


@triton.jit
def addresses_kernel(table, values):
    """Write addresses to a table on the device. They travel as arguments, so a CUDA graph keeps them."""
    for k in tl.static_range(len(values)):
        tl.store(table + k, values[k])


@triton.jit
def pointer(table, index):
    """The pointer to float32 numbers at an index of a table."""
    return tl.load(table + index).to(tl.pointer_type(tl.float32))


def addresses(tensors: Sequence[Tensor]) -> Int[Tensor, "N"]:
    """The addresses of tensors on their device, without a copy from the host."""
    table = tensors[0].new_empty(len(tensors), dtype=torch.int64)
    for first in range(0, len(tensors), MOST_ADDRESSES):
        some = tuple(tensor.data_ptr() for tensor in tensors[first : first + MOST_ADDRESSES])
        addresses_kernel[(1,)](table[first:], some, num_warps=1)
    return table
