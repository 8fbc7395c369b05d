"""The Triton kernel of an update by the root mean square of past gradients."""

import triton
import triton.language as tl

from longspan.kernels.address_table.kernels import pointer


@triton.jit
def update_kernel(
    weights, gradients, original, squares, tensor_of, first_of, sizes, steps, rate, decay, epsilon,
    BLOCK: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One block of one weight per program. All tables are of addresses; blocks start at multiples of 16."""
    tensor = tl.load(tensor_of + tl.program_id(0))
    at = tl.load(first_of + tl.program_id(0)) + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + tensor)
    at = tl.max_contiguous(tl.multiple_of(at, BLOCK), BLOCK)
    w_at, s_at = pointer(weights, tensor) + at, pointer(squares, tensor) + at
    w_at, s_at = tl.multiple_of(w_at, 16), tl.multiple_of(s_at, 16)
    g = tl.load(tl.multiple_of(pointer(gradients, tensor) + at, 16), mask=inside, other=0.0)
    w = tl.load(w_at, mask=inside, other=0.0)
    s = tl.load(s_at, mask=inside, other=0.0) + g * g
    tl.store(s_at, s, mask=inside)
    if DECAY:
        o = tl.load(tl.multiple_of(pointer(original, tensor) + at, 16), mask=inside, other=0.0)
        w += decay * (o - w)
    root = tl.sqrt_rn(tl.div_rn(s, tl.load(steps))) + epsilon
    tl.store(w_at, w - rate * tl.div_rn(g, root), mask=inside)
