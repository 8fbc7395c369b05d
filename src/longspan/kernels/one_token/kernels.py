"""The Triton kernels of a one-token step: linear layers and attention over a rolling cache."""

import triton
import triton.language as tl

LAYER = tl.constexpr(1)


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Programmatic dependent launch: the next kernel may start now, and this one waits for the previous one's results.
    What comes before this call must not depend on them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_tile(x, rows, B, k, K: tl.constexpr):
    """Rows of a [B, K] matrix at the columns k, zero outside."""
    return tl.load(x + rows[:, None] * K + k[None, :], mask=(rows < B)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def deviation(tile, known, eps, K: tl.constexpr, KIND: tl.constexpr):
    """Mean (0 for RMS) and reciprocal deviation of each row of a tile with complete rows."""
    mean = tl.zeros([tile.shape[0]], tl.float32)
    if KIND == LAYER:
        mean = tl.sum(tile, 1) / K
    away = tl.where(known, tile - mean[:, None], 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(away * away, 1) / K + eps)


@triton.jit
def normed(tile, mean, scale, gain, shift, columns, inside, KIND: tl.constexpr):
    tile = (tile - mean[:, None]) * scale[:, None]
    tile = tile * tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND == LAYER:
        tile += tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def load_complete(x, rows, B, K: tl.constexpr, BK: tl.constexpr):
    """Complete rows of a [B, K] matrix in float32, and which columns exist."""
    k = tl.arange(0, BK)
    return load_tile(x, rows, B, k, K).to(tl.float32), (k < K)[None, :]


@triton.jit
def finish(
    acc, rows, columns, bias, out, residual, gain, shift, eps, B,
    N: tl.constexpr, BN: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Apply bias, activation and residual, and store a tile of the result."""
    inside = columns < N
    if BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == 1:
        acc = tl.maximum(acc, 0.0)
    if ACTIVATION == 2:
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
    if ACTIVATION == 3:
        acc = 0.5 * acc * (1.0 + tl.math.erf(acc * 0.7071067811865476))
    if RESIDUAL:
        kept = load_tile(residual, rows, B, columns, N).to(tl.float32)
        if NORM:
            row, known = load_complete(residual, rows, B, N, BN)
            mean, scale = deviation(row, known, eps, N, NORM)
            kept = normed(kept, mean, scale, gain, shift, columns, inside, NORM)
        acc += kept
    tl.store(
        out + rows[:, None] * N + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows < B)[:, None] & inside[None, :],
    )


@triton.jit
def row_kernel(
    x, weight, bias, out, gain, shift, eps, residual, residual_gain, residual_shift, residual_eps, B,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_NORM: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row per program: all loads are issued at once."""
    rows = tl.program_id(1) + tl.arange(0, 1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BK)
    matrix = load_tile(weight, columns, N, k, K)
    after_previous(PDL)
    row, known = load_complete(x, rows, B, K, BK)
    if NORM:
        mean, scale = deviation(row, known, eps, K, NORM)
        row = normed(row, mean, scale, gain, shift, k, k < K, NORM)
    acc = tl.sum(matrix.to(tl.float32) * row, 1)[None, :]
    finish(
        acc, rows, columns, bias, out, residual, residual_gain, residual_shift, residual_eps, B,
        N, BN, ACTIVATION, RESIDUAL, RESIDUAL_NORM, BIAS,
    )  # fmt: skip


@triton.jit
def rows_kernel(
    x, weight, bias, out, gain, shift, eps, residual, residual_gain, residual_shift, residual_eps, B,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_NORM: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Several rows per program, which share each loaded weight."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    after_previous(PDL)
    if NORM:
        row, known = load_complete(x, rows, B, K, BK)
        mean, scale = deviation(row, known, eps, K, NORM)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k0 in range(0, K, INNER):
        k = k0 + tl.arange(0, INNER)
        tile = load_tile(x, rows, B, k, K)
        matrix = load_tile(weight, columns, N, k, K)
        if NORM:
            tile = normed(tile.to(tl.float32), mean, scale, gain, shift, k, k < K, NORM).to(matrix.dtype)
        acc = tl.dot(tile, tl.trans(matrix), acc, input_precision=PRECISION)
    finish(
        acc, rows, columns, bias, out, residual, residual_gain, residual_shift, residual_eps, B,
        N, BN, ACTIVATION, RESIDUAL, RESIDUAL_NORM, BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["S", "C"])
def rolling_kernel(
    qkv, keys, values, distance, u, w, written, partial, out, H, S, C, stride_dh, stride_dc, stride_w, scale,
    D: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b, h = bh // H, bh % H
    before = tl.load(written + b * stride_w)
    slot = (before % S).to(tl.int32)
    filled = tl.minimum(before + 1, S).to(tl.int32)
    columns = tl.arange(0, BD)
    known = columns < D
    row = qkv + b * 3 * H * D + h * D + columns
    q = tl.load(row, mask=known, other=0.0).to(tl.float32)
    new_key = tl.load(row + H * D, mask=known, other=0.0)
    new_value = tl.load(row + 2 * H * D, mask=known, other=0.0)
    qu = q + tl.load(u + h * D + columns, mask=known, other=0.0).to(tl.float32)
    qw = q + tl.load(w + h * D + columns, mask=known, other=0.0).to(tl.float32)

    acc = tl.zeros([BD], tl.float32)
    top = float("-inf")
    total = 0.0
    blocks = tl.cdiv(S, SLOTS)
    first, last = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
    own = known & (first * SLOTS <= slot) & (slot < last * SLOTS)
    tl.store(keys + (bh * S + slot) * D + columns, new_key, mask=own)
    tl.store(values + (bh * S + slot) * D + columns, new_value, mask=own)
    for block in tl.range(first, last, num_stages=STAGES):
        s = block * SLOTS + tl.arange(0, SLOTS)
        away = slot - s
        away = tl.where(away < 0, away + S, away)
        seen = (s < S) & (away < filled)
        newest = (s == slot)[:, None]
        here = seen[:, None] & known[None, :]
        offsets = bh * S * D + s[:, None] * D + columns[None, :]
        k = tl.load(keys + offsets, mask=here & ~newest, other=0.0)
        v = tl.load(values + offsets, mask=here & ~newest, other=0.0)
        k = tl.where(newest, new_key[None, :], k).to(tl.float32)
        v = tl.where(newest, new_value[None, :], v).to(tl.float32)
        # Columns of the table descend to distance 0; distances beyond it use the first column.
        r_row = C - 1 - tl.minimum(away, C - 1)
        r = tl.load(distance + h * stride_dh + r_row[:, None] * stride_dc + columns[None, :], mask=here, other=0.0)
        scores = (tl.sum(k * qu[None, :], 1) + tl.sum(r.to(tl.float32) * qw[None, :], 1)) * scale
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - floor)
        shrink = tl.exp(top - floor)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * v, 0)
        top = new_top
    if SPLITS == 1:
        tl.store(out + bh * D + columns, (acc / total).to(out.dtype.element_ty), mask=known)
    else:
        scratch = partial + (bh * SPLITS + split) * (D + 2)
        tl.store(scratch + columns, acc, mask=known)
        tl.store(scratch + D, top)
        tl.store(scratch + D + 1, total)


@triton.jit
def combine_kernel(
    partial, out, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Combine parts of a softmax that have different largest scores."""
    after_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BD)
    known = columns < D
    split = tl.arange(0, PADDED)
    scratch = partial + (bh * SPLITS + split) * (D + 2)
    there = split < SPLITS
    tops = tl.load(scratch + D, mask=there, other=float("-inf"))
    totals = tl.load(scratch + D + 1, mask=there, other=0.0)
    share = tl.exp(tops - tl.max(tops, 0))
    parts = tl.load(scratch[:, None] + columns[None, :], mask=there[:, None] & known[None, :], other=0.0)
    out_row = tl.sum(parts * share[:, None], 0) / tl.sum(totals * share, 0)
    tl.store(out + bh * D + columns, out_row.to(out.dtype.element_ty), mask=known)
