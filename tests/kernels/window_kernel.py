"""A kernel that writes the addresses of fused_slide.py, for tests of its window."""

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_slide import key_address, window_address


@triton.jit
def addresses_kernel(found, T: tl.constexpr, SLIDE: tl.constexpr):
    """Three tables [T, T] from `found` on: the older half of the window, the newer one, and the keys."""
    at = found + tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(at, window_address(0, 0, T, SLIDE))
    tl.store(at + T * T, window_address(0, 1, T, SLIDE))
    tl.store(at + 2 * T * T, key_address(0, T, SLIDE))
