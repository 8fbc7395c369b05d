"""The Triton functions that write and read tables of addresses."""

import triton
import triton.language as tl


@triton.jit
def addresses_kernel(table, values):
    """Write addresses to a table on the device. They travel as arguments, so a CUDA graph keeps them."""
    for k in tl.static_range(len(values)):
        tl.store(table + k, values[k])


@triton.jit
def pointer(table, index):
    """The pointer to float32 numbers at an index of a table."""
    return tl.load(table + index).to(tl.pointer_type(tl.float32))
