"""The Triton kernels of an RMS norm of short rows, forward and backward."""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(x, gain, out, R, eps, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """out = gain x / sqrt(mean(x^2) + eps) for a block of rows."""
    rows, units = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    at = rows[:, None] * D + units[None, :]
    inside = (rows < R)[:, None] & (units < D)[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gain + units, mask=units < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / D + eps)
    tl.store(out + at, (values * scale[:, None] * g[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad, x, gain, out, partial, R, eps, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """With n = x s and s = 1 / sqrt(mean(x^2) + eps): the gradient s (g grad - n mean(g grad n)) of x, and a part of
    that of the gains, sum(grad n). A program takes every P-th block of rows."""
    units = tl.arange(0, BD)
    g = tl.load(gain + units, mask=units < D, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BD], tl.float32)  # summed over rows once, at the end
    for block in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        rows = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at = rows[:, None] * D + units[None, :]
        inside = (rows < R)[:, None] & (units < D)[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / D + eps)
        n = values * scale[:, None]
        total += slope * n
        slope *= g[None, :]
        made = scale[:, None] * (slope - n * (tl.sum(slope * n, 1) / D)[:, None])
        tl.store(out + at, made.to(out.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * D + units, tl.sum(total, 0), mask=units < D)
