"""The Triton kernels of a one-token step: linear layers and attention over a rolling cache."""

import triton
import triton.language as tl

LAYER = tl.constexpr(1)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start once all programs have called this. It then waits in `after_previous`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait until the previous kernel is complete and its results are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_tile(x, rows, B, k, K: tl.constexpr):
    """Rows of a [B, K] matrix at the columns k, zero outside."""
    return tl.load(x + rows[:, None] * K + k[None, :], mask=(rows < B)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def deviation(tile, known, eps, K: tl.constexpr, KIND: tl.constexpr):
    """Mean (0 for RMS) and reciprocal deviation of each row of a tile with complete rows, zero outside.

    Numbers of 16 bits are summed in one pass, with fewer barriers and registers. The error of the difference of two
    float32 sums is far below the rounding of such numbers.
    """
    mean = tl.zeros([tile.shape[0]], tl.float32)
    wide = tile.to(tl.float32)
    if KIND == LAYER and tile.dtype != tl.float32:
        total, squares = tl.split(tl.sum(tl.join(wide, wide * wide), 1))
        mean = total / K
        variance = tl.maximum(squares / K - mean * mean, 0.0)
    else:
        if KIND == LAYER:
            mean = tl.sum(wide, 1) / K
        away = tl.where(known, wide - mean[:, None], 0.0)
        variance = tl.sum(away * away, 1) / K
    return mean, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def normed(tile, mean, scale, gain, shift, columns, inside, KIND: tl.constexpr):
    gains, shifts = load_gains(gain, shift, columns, inside, KIND)
    return scaled(tile, mean, scale, gains, shifts, KIND)


@triton.jit
def load_gains(gain, shift, columns, inside, KIND: tl.constexpr):
    """Gain and shift of a norm at some columns. Without a shift, the second is the gain and is not used."""
    gains = tl.load(gain + columns, mask=inside, other=0.0)
    shifts = gains
    if KIND == LAYER:
        shifts = tl.load(shift + columns, mask=inside, other=0.0)
    return gains, shifts


@triton.jit
def scaled(tile, mean, scale, gains, shifts, KIND: tl.constexpr):
    tile = (tile.to(tl.float32) - mean[:, None]) * scale[:, None] * gains.to(tl.float32)[None, :]
    if KIND == LAYER:
        tile += shifts.to(tl.float32)[None, :]
    return tile


@triton.jit
def load_complete(x, rows, B, K: tl.constexpr, BK: tl.constexpr):
    """Complete rows of a [B, K] matrix, and which columns exist."""
    k = tl.arange(0, BK)
    return load_tile(x, rows, B, k, K), (k < K)[None, :]


@triton.jit
def activated(acc, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        acc = tl.maximum(acc, 0.0)
    if ACTIVATION == 2:
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
    if ACTIVATION == 3:
        acc = 0.5 * acc * (1.0 + tl.math.erf(acc * 0.7071067811865476))
    return acc


@triton.jit
def store_tile(acc, out, rows, B, columns, N: tl.constexpr):
    inside = (rows < B)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_kernel(
    x, weight, bias, out, gain, shift, eps, residual, residual_gain, residual_shift, residual_eps, B,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_NORM: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row per program: all loads are issued at once."""
    let_next_start(PDL)
    rows = tl.program_id(1) + tl.arange(0, 1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BK)
    matrix = load_tile(weight, columns, N, k, K)
    after_previous(PDL)
    row, known = load_complete(x, rows, B, K, BK)
    if NORM:
        mean, scale = deviation(row, known, eps, K, NORM)
        row = normed(row, mean, scale, gain, shift, k, k < K, NORM)
    acc = tl.sum(matrix.to(tl.float32) * row.to(tl.float32), 1)[None, :]
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    acc = activated(acc, ACTIVATION)
    if RESIDUAL:
        kept = load_tile(residual, rows, B, columns, N)
        if RESIDUAL_NORM:
            complete, there = load_complete(residual, rows, B, N, BN)
            mean, scale = deviation(complete, there, residual_eps, N, RESIDUAL_NORM)
            kept = normed(kept, mean, scale, residual_gain, residual_shift, columns, columns < N, RESIDUAL_NORM)
        acc += kept.to(tl.float32)
    store_tile(acc, out, rows, B, columns, N)


@triton.jit
def rows_kernel(
    x, weight, bias, out, gain, shift, eps, residual, residual_gain, residual_shift, residual_eps, B,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_NORM: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Several rows per program, which share each loaded weight.

    A product of this size is bound by latency. So everything is loaded before the first barrier, which no load can
    cross. The weights are loaded last, because they go to shared memory, with a barrier, as soon as they arrive. With
    dependent launch they are loaded first, before the wait for the previous kernel; in float32 as well, because the
    compiler spills all registers otherwise.
    """
    let_next_start(PDL)
    FIRST: tl.constexpr = PDL or PRECISION == "ieee"
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    inside = columns < N
    n = tl.arange(0, BN)
    if INNER >= K:
        if FIRST:
            matrix = load_tile(weight, columns, N, k, K)
        if NORM:
            gains, shifts = load_gains(gain, shift, k, k < K, NORM)
    if BIAS:
        biases = tl.load(bias + columns, mask=inside, other=0.0)
    if RESIDUAL_NORM:
        kept_gains, kept_shifts = load_gains(residual_gain, residual_shift, columns, inside, RESIDUAL_NORM)
    after_previous(PDL)
    if INNER >= K:
        tile = load_tile(x, rows, B, k, K)
    if RESIDUAL:
        kept = load_tile(residual, rows, B, columns, N)
    if RESIDUAL_NORM:
        kept_rows = load_tile(residual, rows, B, n, N)
    if INNER >= K and not FIRST:
        matrix = load_tile(weight, columns, N, k, K)
    if NORM:
        if INNER >= K:
            mean, scale = deviation(tile, (k < K)[None, :], eps, K, NORM)
        else:
            row, known = load_complete(x, rows, B, K, BK)
            mean, scale = deviation(row, known, eps, K, NORM)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if INNER >= K:
        if NORM:
            tile = scaled(tile, mean, scale, gains, shifts, NORM).to(matrix.dtype)
        acc = tl.dot(tile, tl.trans(matrix), acc, input_precision=PRECISION)
    else:
        for k0 in range(0, K, INNER):
            at = k0 + k
            tile = load_tile(x, rows, B, at, K)
            matrix = load_tile(weight, columns, N, at, K)
            if NORM:
                tile = normed(tile, mean, scale, gain, shift, at, at < K, NORM).to(matrix.dtype)
            acc = tl.dot(tile, tl.trans(matrix), acc, input_precision=PRECISION)
    if BIAS:
        acc += biases.to(tl.float32)[None, :]
    acc = activated(acc, ACTIVATION)
    if RESIDUAL:
        if RESIDUAL_NORM:
            mean, scale = deviation(kept_rows, (n < N)[None, :], residual_eps, N, RESIDUAL_NORM)
            kept = scaled(kept, mean, scale, kept_gains, kept_shifts, RESIDUAL_NORM)
        acc += kept.to(tl.float32)
    store_tile(acc, out, rows, B, columns, N)


@triton.jit
def load_slots(
    keys, values, distance, block, bh, slot, filled, S, C, stride_dc,
    D: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Keys, values and position keys of a block of older slots, and which of them are visible."""
    columns = tl.arange(0, BD)
    j = block * SLOTS + tl.arange(0, SLOTS)
    away = S - 1 - j
    seen = (away > 0) & (away < filled)
    here = seen[:, None] & (columns < D)[None, :]
    s = slot + 1 + j
    s = tl.where(s < S, s, s - S)
    offsets = (bh * S + s)[:, None] * D + columns[None, :]
    k = tl.load(keys + offsets, mask=here, other=0.0)
    v = tl.load(values + offsets, mask=here, other=0.0)
    # Columns of the table descend to distance 0; distances beyond it use the first column.
    r_row = C - 1 - tl.minimum(away, C - 1)
    r = tl.load(distance + r_row[:, None] * stride_dc + columns[None, :], mask=here, other=0.0)
    return k, v, r, seen


@triton.jit
def beyond(away, C):
    """The logarithm of the distances relative to C - 1, the longest in the table; 0 for shorter ones."""
    longest = tl.maximum(C - 1, 1)
    return tl.log(tl.maximum(away, longest).to(tl.float32) / longest)


@triton.jit
def attend_slots(
    k, v, r, seen, qu, qw, acc, top, total, block, S, C, discount, SLOTS: tl.constexpr, DISCOUNT: tl.constexpr
):  # fmt: skip
    """A step of the running softmax. Each row of a tile has its own."""
    scores = tl.sum(k.to(tl.float32) * qu[None, :] + r.to(tl.float32) * qw[None, :], 1)
    if DISCOUNT:
        scores -= discount * beyond(S - 1 - block * SLOTS - tl.arange(0, SLOTS), C)
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, scores)
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - floor)
    shrink = tl.exp(top - floor)
    acc = acc * shrink[:, None] + weights[:, None] * v.to(tl.float32)
    return acc, new_top, total * shrink + weights


@triton.jit(do_not_specialize=["S", "C"])
def rolling_kernel(
    qkv, keys, values, distance, u, w, written, partial, out, H, S, C, stride_dh, stride_dc, stride_w, scale, discount,
    D: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    DISCOUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The older slots are walked from the largest distance to 1, so the order of a sum does not depend on the slot.
    With dependent launch the first block is loaded before the query is known: older slots and `written` are those of
    earlier steps."""
    let_next_start(PDL)
    bh = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b, h = bh // H, bh % H
    before = tl.load(written + b * stride_w)
    slot = (before % S).to(tl.int32)
    filled = tl.minimum(before + 1, S).to(tl.int32)
    columns = tl.arange(0, BD)
    known = columns < D
    distance += h * stride_dh
    bias_u = tl.load(u + h * D + columns, mask=known, other=0.0).to(tl.float32)
    bias_w = tl.load(w + h * D + columns, mask=known, other=0.0).to(tl.float32)
    near = tl.load(distance + (C - 1) * stride_dc + columns, mask=known, other=0.0).to(tl.float32)
    blocks = tl.cdiv(S - 1, SLOTS)
    first, last = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
    if PDL:
        k, v, r, seen = load_slots(keys, values, distance, first, bh, slot, filled, S, C, stride_dc, D, BD, SLOTS)
    after_previous(PDL)
    row = qkv + b * 3 * H * D + h * D + columns
    q = tl.load(row, mask=known, other=0.0).to(tl.float32)
    new_key = tl.load(row + H * D, mask=known, other=0.0)
    new_value = tl.load(row + 2 * H * D, mask=known, other=0.0)
    qu, qw = (q + bias_u) * scale, (q + bias_w) * scale

    acc = tl.zeros([SLOTS, BD], tl.float32)
    top = tl.full([SLOTS], float("-inf"), tl.float32)
    total = tl.zeros([SLOTS], tl.float32)
    if PDL:
        acc, top, total = attend_slots(
            k, v, r, seen & (first < last), qu, qw, acc, top, total, first, S, C, discount, SLOTS, DISCOUNT
        )  # fmt: skip
        first += 1
    for block in tl.range(first, last, num_stages=STAGES):
        k, v, r, seen = load_slots(keys, values, distance, block, bh, slot, filled, S, C, stride_dc, D, BD, SLOTS)
        acc, top, total = attend_slots(
            k, v, r, seen, qu, qw, acc, top, total, block, S, C, discount, SLOTS, DISCOUNT
        )  # fmt: skip
    largest = tl.max(top, 0)
    share = tl.exp(top - tl.where(largest == float("-inf"), 0.0, largest))
    result, whole = tl.sum(acc * share[:, None], 0), tl.sum(total * share, 0)
    if split == SPLITS - 1:
        # The newest token, whose key and value are not in their slot yet.
        tl.store(keys + (bh * S + slot) * D + columns, new_key, mask=known)
        tl.store(values + (bh * S + slot) * D + columns, new_value, mask=known)
        score = tl.sum(new_key.to(tl.float32) * qu + near * qw, 0)
        highest = tl.maximum(largest, score)
        result = result * tl.exp(largest - highest) + new_value.to(tl.float32) * tl.exp(score - highest)
        whole = whole * tl.exp(largest - highest) + tl.exp(score - highest)
        largest = highest
    if SPLITS == 1:
        tl.store(out + bh * D + columns, (result / whole).to(out.dtype.element_ty), mask=known)
    else:
        scratch = partial + (bh * SPLITS + split) * (D + 2)
        tl.store(scratch + columns, result, mask=known)
        tl.store(scratch + D, largest)
        tl.store(scratch + D + 1, whole)


@triton.jit
def combine_kernel(
    partial, out, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Combine parts of a softmax that have different largest scores."""
    let_next_start(PDL)
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
