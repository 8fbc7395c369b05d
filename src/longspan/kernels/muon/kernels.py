"""The Triton kernels of a Muon step: momentum, symmetric products, and the last product with the update."""

import triton
import triton.language as tl

from longspan.kernels.address_table.kernels import pointer


@triton.jit
def momentum_kernel(
    gradients, momenta, x, sums, blocked, momentum, R, C,
    T: tl.constexpr, TALL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """m <- lerp(m, g, 1 - momentum) and x = lerp(g, m, momentum) for a tile of one matrix, and its sum of squares.

    x is stored with at least as many columns as rows: a tall matrix is transposed.
    """
    if tl.load(blocked) != 0:
        return
    matrix, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    across = tl.cdiv(C, T)
    rows, columns = tile // across * T + tl.arange(0, T), tile % across * T + tl.arange(0, T)
    at = rows[:, None] * C + columns[None, :]
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    if EVEN:
        here = tl.multiple_of(pointer(gradients, matrix) + at, [1, 16])
        g = tl.load(here)
        m = tl.load(momenta + matrix * R * C + at)
    else:
        g = tl.load(pointer(gradients, matrix) + at, mask=inside, other=0.0)
        m = tl.load(momenta + matrix * R * C + at, mask=inside, other=0.0)
    m = g + momentum * (m - g)
    u = (g + momentum * (m - g)).to(x.dtype.element_ty)
    tl.store(sums + matrix * tl.num_programs(0) + tile, tl.sum(tl.sum(u.to(tl.float32) * u.to(tl.float32), 1), 0))
    if EVEN:
        tl.store(momenta + matrix * R * C + at, m)
    else:
        tl.store(momenta + matrix * R * C + at, m, mask=inside)
    if TALL:
        u, at = tl.trans(u), columns[:, None] * R + rows[None, :]
        inside = tl.trans(inside)
    if EVEN:
        tl.store(x + matrix * R * C + at, u)
    else:
        tl.store(x + matrix * R * C + at, u, mask=inside)


@triton.jit
def reciprocal_norm(sums, matrix, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """1 / (norm + 1e-7) of a matrix from the sums of squares of its tiles."""
    k = tl.arange(0, PADDED)
    return 1.0 / (tl.sqrt(tl.sum(tl.load(sums + matrix * PARTS + k, mask=k < PARTS, other=0.0), 0)) + 1e-7)


@triton.jit
def symmetric_kernel(
    x, out, sums, alpha, beta, R, C,
    T: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = alpha x x^T, plus beta x if x is square (ADD); tiles below the diagonal are copies of those above.

    With PARTS, x is divided by its norm first.
    """
    matrix, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x += matrix * R * C
    out += matrix * R * R
    # Tile p is (i, j) with i <= j and p = j (j + 1) / 2 + i. The offset makes up for an approximate root.
    j = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5 + 1e-3).to(tl.int32)
    i = tile - j * (j + 1) // 2
    rows, columns, k = i * T + tl.arange(0, T), j * T + tl.arange(0, T), tl.arange(0, BK)
    left, right = x + rows[:, None] * C + k[None, :], x + columns[None, :] * C + k[:, None]
    acc = tl.zeros([T, T], tl.float32)
    for first in range(0, C, BK):
        if EVEN:
            a, b = tl.load(left + first), tl.load(right + first)
        else:
            known = k < C - first
            a = tl.load(left + first, mask=(rows < R)[:, None] & known[None, :], other=0.0)
            b = tl.load(right + first, mask=(columns < R)[None, :] & known[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if PARTS:
        scale = reciprocal_norm(sums, matrix, PARTS, PADDED)
        acc *= scale * scale
    acc *= alpha
    inside = (rows < R)[:, None] & (columns < R)[None, :]
    at = rows[:, None] * R + columns[None, :]
    if ADD:
        acc += beta * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    made = acc.to(out.dtype.element_ty)
    tl.store(out + at, made, mask=inside)
    if i != j:
        tl.store(out + columns[:, None] * R + rows[None, :], tl.trans(made), mask=tl.trans(inside))


@triton.jit
def apply_kernel(
    b, x, out, sums, a, R, C, weights, blocked, lr, scale, decay,
    T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    UPDATE: tl.constexpr, TALL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = a x + b x with a symmetric b; with PARTS, x is divided by its norm first.

    y goes to `out`, or with UPDATE to the weights: w <- w - lr (scale y + decay w). Those of a tall matrix are
    transposed.
    """
    if UPDATE:  # noqa: SIM102 (the other condition is no constant)
        if tl.load(blocked) != 0:
            return
    matrix, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x += matrix * R * C
    down = tl.cdiv(R, T)  # neighbouring programs share columns of x
    rows, columns = tile % down * T + tl.arange(0, T), tile // down * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = b + matrix * R * R + rows[:, None] * R + k[None, :]
    right = x + k[:, None] * C + columns[None, :]
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    at = rows[:, None] * C + columns[None, :]
    # Added before the loop and not after it, where it would take registers beside the weights.
    if EVEN:
        acc = a * tl.load(x + at).to(tl.float32)
    else:
        acc = a * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, R, BK):
        if EVEN:
            p, q = tl.load(left + first), tl.load(right + first * C)
        else:
            known = k < R - first
            p = tl.load(left + first, mask=(rows < R)[:, None] & known[None, :], other=0.0)
            q = tl.load(right + first * C, mask=known[:, None] & (columns < C)[None, :], other=0.0)
        acc = tl.dot(p, q, acc, input_precision=PRECISION)
    if PARTS:
        acc *= reciprocal_norm(sums, matrix, PARTS, PADDED)
    if UPDATE:
        if TALL:
            acc, inside, at = tl.trans(acc), tl.trans(inside), columns[:, None] * R + rows[None, :]
        rate, where = tl.load(lr), pointer(weights, matrix) + at
        if EVEN:
            where = tl.multiple_of(where, [1, 16])
            w = tl.load(where)
            tl.store(where, w - rate * (scale * acc + decay * w))
        else:
            w = tl.load(where, mask=inside, other=0.0)
            tl.store(where, w - rate * (scale * acc + decay * w), mask=inside)
    else:
        tl.store(out + matrix * R * C + at, acc.to(out.dtype.element_ty), mask=inside)
