"""The forward pass: one program per block of queries goes over the keys from the oldest visible one to its own."""

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_slide import (
    GATHER,
    carry_back,
    keep_block,
    keep_first,
    rolling_buffer,
    slide,
)

# Specialising on lengths that are multiples of 16 gains nothing and would compile the kernel again.
LENGTHS = ["L", "M", "C", "window"]


@triton.jit
def load_rows(base, rows, stride, count, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a [count, D] matrix as a [rows, BD] tile, zero outside."""
    columns = tl.arange(0, BD)
    here = ((rows >= 0) & (rows < count))[:, None]
    if BD != D:
        here = here & (columns < D)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=here, other=0.0)


@triton.jit
def load_keys(
    base, b, h, j0, stride, count, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """T rows from j0 on, zero outside. `base` is a descriptor of [B, H, count, D] if TMA, else points to row 0."""
    if TMA:
        tile = base.load([b, h, j0, 0]).reshape(T, BD)
    else:
        tile = load_rows(base, j0 + tl.arange(0, T), stride, count, D, BD)
    return tile


@triton.jit
def load_distances(base, first, stride, C, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr):
    """T distances of the position table from `first` downwards; distances beyond the table use its last one."""
    rows = tl.minimum(tl.maximum(C - 1 - first + tl.arange(0, T), 0), C - 1)
    columns = tl.arange(0, BD)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if BD == D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tile


@triton.jit
def reach(i0, M, L, window, first, T: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """The farthest tile that the queries i0.. see, and the farthest that all of them see completely."""
    oldest = 0
    oldest_of_all = 0
    if FIRST:
        oldest = tl.maximum(tl.load(first + i0).to(tl.int32), 0)
        oldest_of_all = tl.maximum(tl.load(first + tl.minimum(i0 + T, L) - 1).to(tl.int32), 0)
    farthest = tl.cdiv(tl.maximum(M + i0 - oldest, 0), T)
    complete = tl.maximum(M + i0 - oldest_of_all, 0) // T
    if WINDOW:
        farthest = tl.minimum(farthest, (window - 2 + T) // T)
        complete = tl.minimum(complete, tl.maximum(window - T, 0) // T)
    return farthest, complete


@triton.jit
def share_of(farthest, complete):
    """This program's tiles of a block of queries, if several programs share it: the same two, and the nearest tile."""
    share = tl.cdiv(farthest + 1, tl.num_programs(2))
    farthest = tl.maximum(farthest - tl.program_id(2) * share, -1)
    return farthest, tl.minimum(complete, farthest), tl.maximum(farthest - share + 1, 0)


@triton.jit
def visible(i, j, M, window, oldest, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """Whether query i sees key j; the arguments broadcast."""
    gap = M + i - j
    seen = (gap >= 0) & (j >= 0)
    if WINDOW:
        seen = seen & (gap < window)
    if FIRST:
        seen = seen & (j >= oldest)
    return seen


@triton.jit
def scrambled(x):
    """A 32-bit hash in which every input bit affects every output bit (Wellons 2018, lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(seed, bh, i, j, K, dropout):
    """Counter-based dropout: the same result for the same weight in every kernel.

    A hash of a few operations, because tl.rand computes ten rounds of Philox for four numbers and returns one.
    """
    row = scrambled((seed + bh * 1000003).to(tl.uint32))
    drawn = scrambled((i * K + j).to(tl.uint32) ^ row)
    return (drawn >> 8).to(tl.float32) * (1 / 16777216) >= dropout


@triton.jit
def forward_span(
    acc, top, total, older, done, far, near, qu, qw, base, key, value, distance, first, seed,
    stride_key, stride_value, stride_distance, bh, H, i0, M, L, C, window, scale, dropout, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    DISCOUNT: tl.constexpr,
):  # fmt: skip
    """Tiles far, far-1, ..., near of one block of queries, after `done` other tiles."""
    K = M + L
    i = i0 + tl.arange(0, T)
    if FIRST and MASKED:
        oldest = tl.load(first + i, mask=i < L, other=0)[:, None]
    else:
        oldest = 0
    for step in tl.range(0, far - near + 1, disable_licm=True):
        n = far - step
        j0 = M + i0 - n * T
        j = j0 + tl.arange(0, T)
        r = load_distances(distance, n * T - 1, stride_distance, C, D, BD, T)
        newer = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
        at = keep_block(base, done + step, newer, T, SLIDE)
        k = load_keys(key, bh // H, bh % H, j0, stride_key, K, D, BD, T, TMA)
        scores = tl.dot(qu, tl.trans(k), slide(at, older, newer, T, SLIDE), input_precision=PRECISION)
        if SLIDE == GATHER:
            older = newer
        if DISCOUNT:
            longest = tl.maximum(C - 1, 1)
            gap = tl.maximum(M + i[:, None] - j[None, :], longest)
            scores -= discount * tl.log2(gap.to(tl.float32) / longest)
        if MASKED:
            seen = visible(i[:, None], j[None, :], M, window, oldest, WINDOW, FIRST)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        if MASKED:
            # A row without a visible key so far would compute -inf - -inf.
            floor = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            floor = new_top
        weights = tl.exp2(scores * scale - (floor * scale)[:, None])
        shrink = tl.exp2((top - floor) * scale)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            weights = tl.where(kept(seed, bh, i[:, None], j[None, :], K, dropout), weights / (1 - dropout), 0.0)
        v = load_keys(value, bh // H, bh % H, j0, stride_value, K, D, BD, T, TMA)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
        carry_back(base, done + step, weights, T, SLIDE)
    return acc, top, total, older


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    query, key, value, distance, u, w, first, seed_ptr, out, lse,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_dh, stride_dc, stride_ob, stride_oh, stride_ol,
    H, L, M, C, window, scale, dropout, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    DISCOUNT: tl.constexpr, SPLIT: tl.constexpr = False,
):  # fmt: skip
    """The output of one block of queries, or with SPLIT of a part of its keys."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    # The last queries see the most keys, so they start first.
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * T
    columns = tl.arange(0, BD)
    i = i0 + tl.arange(0, T)
    q = load_rows(query + b * stride_qb + h * stride_qh, i, stride_ql, L, D, BD)
    qu = (q + tl.load(u + h * D + columns, mask=columns < D, other=0.0)[None, :]).to(q.dtype)
    qw = (q + tl.load(w + h * D + columns, mask=columns < D, other=0.0)[None, :]).to(q.dtype)
    if not TMA:
        key += b * stride_kb + h * stride_kh
        value += b * stride_vb + h * stride_vh
    distance += h * stride_dh
    if FIRST:
        first += b * L
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    base = rolling_buffer(T, SLIDE)
    farthest, complete = reach(i0, M, L, window, first, T, WINDOW, FIRST)
    nearest = 0
    if SPLIT:
        farthest, complete, nearest = share_of(farthest, complete)
    r = load_distances(distance, (farthest + 1) * T - 1, stride_dc, C, D, BD, T)
    older = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
    keep_first(base, older, T, SLIDE)
    acc = tl.zeros([T, BD], tl.float32)
    top = tl.full([T], float("-inf"), tl.float32)
    total = tl.zeros([T], tl.float32)
    after = complete + 1
    if SPLIT:
        after = tl.maximum(after, nearest)
    acc, top, total, older = forward_span(
        acc, top, total, older, 0, farthest, after, qu, qw, base, key, value, distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, H, i0, M, L, C, window, scale, dropout, discount,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, TMA, DISCOUNT,
    )  # fmt: skip
    done, near = farthest - complete, 1
    if SPLIT:
        done, near = tl.maximum(farthest + 1 - after, 0), tl.maximum(nearest, 1)
    acc, top, total, older = forward_span(
        acc, top, total, older, done, complete, near, qu, qw, base, key, value, distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, H, i0, M, L, C, window, scale, dropout, discount,
        D, BD, T, False, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, TMA, DISCOUNT,
    )  # fmt: skip
    own = 0
    if SPLIT:
        own = tl.minimum(farthest, 0)
    acc, top, total, older = forward_span(
        acc, top, total, older, farthest, own, nearest, qu, qw, base, key, value, distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, H, i0, M, L, C, window, scale, dropout, discount,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, TMA, DISCOUNT,
    )  # fmt: skip

    if SPLIT:
        # Results of all parts are contiguous. A part may have no visible key.
        first_row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) * L
        out += first_row * D
        lse += first_row
        shares = tl.where(total > 0.0, total, 1.0)
    else:
        shares = total
    out += b * stride_ob + h * stride_oh
    tl.store(
        out + i[:, None] * stride_ol + columns[None, :],
        (acc / shares[:, None]).to(out.dtype.element_ty),
        mask=(i < L)[:, None] & (columns < D)[None, :],
    )
    tl.store(lse + bh * L + i, top * scale + tl.log2(total), mask=i < L)
