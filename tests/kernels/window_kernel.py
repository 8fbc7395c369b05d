"""A kernel that writes the addresses of fused_slide.py, for tests of its window."""

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_slide import HALF, key_address, window_address


@triton.jit
def addresses_kernel(found, T: tl.constexpr, Q: tl.constexpr):
    """Three tables [Q, T] from `found` on: ages 0 and 1 and the keys. A fourth, age 2, if Q is 2 T."""
    at = found + tl.arange(0, Q)[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(at, window_address(0, 0, T, HALF, Q))
    tl.store(at + Q * T, window_address(0, 1, T, HALF, Q))
    tl.store(at + 2 * Q * T, key_address(0, T, HALF, Q))
    if Q > T:
        tl.store(at + 3 * Q * T, window_address(0, 2, T, HALF, Q))
