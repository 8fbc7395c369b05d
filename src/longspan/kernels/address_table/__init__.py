"""Tables of addresses on the device, so that one kernel can work on many tensors."""

from collections.abc import Sequence

import torch

from longspan.shapes import Int, Tensor

MOST_ADDRESSES = 64
"""Per launch: the arguments of a kernel are limited to 4 KB."""


def addresses(tensors: Sequence[Tensor]) -> Int[Tensor, "N"]:
    """The addresses of tensors on their device, without a copy from the host."""
    from longspan.kernels.address_table.kernels import addresses_kernel

    table = tensors[0].new_empty(len(tensors), dtype=torch.int64)
    for first in range(0, len(tensors), MOST_ADDRESSES):
        some = tuple(tensor.data_ptr() for tensor in tensors[first : first + MOST_ADDRESSES])
        addresses_kernel[(1,)](table[first:], some, num_warps=1)
    return table
