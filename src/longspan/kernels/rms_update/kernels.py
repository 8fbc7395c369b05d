"""The Triton kernel of an update by the root mean square of past gradients."""

import triton
import triton.language as tl

from longspan.kernels.address_table.kernels import pointer


@triton.jit
def update_kernel(
    weights, gradients, original, squares, rounded, tensor_of, first_of, sizes, steps, rate, decay, epsilon,
    BLOCK: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One block of one weight per program. All tables are of addresses; blocks start at multiples of 16.

    A weight with an address other than 0 in `rounded` has its bfloat16 copy there, and a bfloat16 gradient.
    """
    tensor = tl.load(tensor_of + tl.program_id(0))
    at = tl.load(first_of + tl.program_id(0)) + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + tensor)
    at = tl.max_contiguous(tl.multiple_of(at, BLOCK), BLOCK)
    w_at, s_at = pointer(weights, tensor) + at, pointer(squares, tensor) + at
    w_at, s_at = tl.multiple_of(w_at, 16), tl.multiple_of(s_at, 16)
    w = tl.load(w_at, mask=inside, other=0.0)
    s = tl.load(s_at, mask=inside, other=0.0)
    copy = tl.load(rounded + tensor)
    if copy != 0:
        g_at = tl.load(gradients + tensor).to(tl.pointer_type(tl.bfloat16)) + at
        g = tl.load(tl.multiple_of(g_at, 16), mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(tl.multiple_of(pointer(gradients, tensor) + at, 16), mask=inside, other=0.0)
    s += g * g
    tl.store(s_at, s, mask=inside)
    if DECAY:
        o = tl.load(tl.multiple_of(pointer(original, tensor) + at, 16), mask=inside, other=0.0)
        w += decay * (o - w)
    root = tl.sqrt_rn(tl.div_rn(s, tl.load(steps))) + epsilon
    w -= rate * tl.div_rn(g, root)
    tl.store(w_at, w, mask=inside)
    if copy != 0:
        c_at = copy.to(tl.pointer_type(tl.bfloat16)) + at
        tl.store(tl.multiple_of(c_at, 16), w.to(tl.bfloat16), mask=inside)
