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
    """The farthest tile of keys that the T queries from i0 on see, and the farthest that all see completely."""
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
def log2(x, SLIDE: tl.constexpr):
    """One instruction, with an error of 2^-22, where Triton's has twenty."""
    x = x.to(tl.float32)
    if SLIDE == GATHER:
        found = tl.log2(x)
    else:
        found = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return found


@triton.jit
def far_loss(n, C, discount, T: tl.constexpr, SLIDE: tl.constexpr):
    """What scores lose at the T distances from n T - 1 downwards: discount * log2(d / (C - 1)) beyond the table."""
    longest = tl.maximum(C - 1, 1)
    gap = tl.maximum(n * T - 1 - tl.arange(0, T), longest)
    return discount * (log2(gap, SLIDE) - log2(longest + 0 * gap, SLIDE))


@triton.jit
def position_scores(
    n, h, qw, distance, stride_distance, C, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, TABLE: tl.constexpr,
    DISCOUNT: tl.constexpr, SLIDE: tl.constexpr,
):  # fmt: skip
    """The block of position scores that tile n adds to the window, [query, distance]. With TABLE, `distance` is a
    descriptor of [1, H, C, D]: distances beyond the table are zero instead of its last one."""
    if TABLE:
        r = distance.load([0, h, C - n * T, 0]).reshape(T, BD)
    else:
        r = load_distances(distance, n * T - 1, stride_distance, C, D, BD, T)
    scores = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
    if DISCOUNT:
        scores -= far_loss(n, C, discount, T, SLIDE)[None, :]
    return scores


@triton.jit
def tile_scores(
    n, done, step, older, qu, qw, base, key, distance, stride_key, stride_distance, bh, H, i0, M, L, C, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, TABLE: tl.constexpr, DISCOUNT: tl.constexpr, NEXT: tl.constexpr = 0,
):  # fmt: skip
    """Scores [query, key] of tile n, which is number done + step of its block of queries, or if NEXT is 1 of the tile
    after it; and `older` of the one after that, for a shift without shared memory."""
    n -= NEXT
    newer = position_scores(
        n, bh % H, qw, distance, stride_distance, C, discount, D, BD, T, PRECISION, TABLE, DISCOUNT, SLIDE
    )  # fmt: skip
    keep_block(base, done + step + NEXT, newer, T, SLIDE)
    k = load_keys(key, bh // H, bh % H, M + i0 - n * T, stride_key, M + L, D, BD, T, TMA)
    shifted = slide(base, done + step + NEXT, older, newer, T, SLIDE)
    scores = tl.dot(qu, tl.trans(k), shifted, input_precision=PRECISION)
    if SLIDE == GATHER:
        older = newer
    return scores, older


@triton.jit
def softmax_step(
    scores, n, top, total, oldest, seed, bh, i0, M, L, window, scale, dropout, T: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Weights of tile n relative to the new maximum, the factor for all earlier sums, the new maximum and sum."""
    i = i0 + tl.arange(0, T)
    j = M + i0 - n * T + tl.arange(0, T)
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
        weights = tl.where(kept(seed, bh, i[:, None], j[None, :], M + L, dropout), weights / (1 - dropout), 0.0)
    return weights, shrink, new_top, total


@triton.jit
def forward_span(
    acc, top, total, older, ready, done, far, near, qu, qw, base, key, value, distance, first, seed,
    stride_key, stride_value, stride_distance, bh, H, i0, M, L, C, window, scale, dropout, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    DISCOUNT: tl.constexpr, AHEAD: tl.constexpr, TABLE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Tiles far, far-1, ..., near of one block of queries, after `done` other tiles.

    With AHEAD, a tile ends with the scores of the next one, so that what they load arrives during its softmax: `ready`
    are those of tile `far`. LAST is a single tile and none after it.
    """
    oldest = 0
    if FIRST and MASKED:
        i = i0 + tl.arange(0, T)
        oldest = tl.load(first + i, mask=i < L, other=0)[:, None]
    for step in tl.range(0, far - near + 1, disable_licm=True):
        n = far - step
        if not AHEAD:
            ready, older = tile_scores(
                n, done, step, older, qu, qw, base, key, distance, stride_key, stride_distance, bh, H, i0, M, L, C,
                discount, D, BD, T, SLIDE, PRECISION, TMA, TABLE, DISCOUNT,
            )  # fmt: skip
        weights, shrink, top, total = softmax_step(
            ready, n, top, total, oldest, seed, bh, i0, M, L, window, scale, dropout,
            T, MASKED, WINDOW, FIRST, DROPOUT,
        )  # fmt: skip
        v = load_keys(value, bh // H, bh % H, M + i0 - n * T, stride_value, M + L, D, BD, T, TMA)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        if AHEAD and not LAST:
            ready, older = tile_scores(
                n, done, step, older, qu, qw, base, key, distance, stride_key, stride_distance, bh, H, i0, M, L, C,
                discount, D, BD, T, SLIDE, PRECISION, TMA, TABLE, DISCOUNT, 1,
            )  # fmt: skip
        carry_back(base, done + step + (1 if AHEAD else 0), weights, T, SLIDE)
    return acc, top, total, older, ready


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    query, key, value, distance, u, w, first, seed_ptr, out, lse,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_dh, stride_dc, stride_ob, stride_oh, stride_ol,
    H, L, M, C, window, scale, dropout, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    DISCOUNT: tl.constexpr, AHEAD: tl.constexpr, TABLE: tl.constexpr, SPLIT: tl.constexpr = False,
):  # fmt: skip
    """The output of one block of T queries, or with SPLIT of a part of its keys."""
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
    if not TABLE:
        distance += h * stride_dh
    if FIRST:
        first += b * L
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    if AHEAD and BD > 64:
        # Zero as a product, which has the layout of sums. Else Triton would carry them twice through the first loop,
        # and ptxas would wait after every tensor-core instruction.
        acc = tl.dot(tl.zeros([T, 16], q.dtype), tl.zeros([16, BD], q.dtype), input_precision=PRECISION)
    base = rolling_buffer(T, SLIDE)
    farthest, complete = reach(i0, M, L, window, first, T, WINDOW, FIRST)
    nearest = 0
    if SPLIT:
        tl.static_assert(not AHEAD)
        farthest, complete, nearest = share_of(farthest, complete)
    older = position_scores(
        farthest + 1, h, qw, distance, stride_dc, C, discount, D, BD, T, PRECISION, TABLE, DISCOUNT, SLIDE
    )  # fmt: skip
    keep_first(base, older, T, SLIDE)
    if not (AHEAD and BD > 64):
        acc = tl.zeros([T, BD], tl.float32)
    top = tl.full([T], float("-inf"), tl.float32)
    total = tl.zeros([T], tl.float32)
    ready = tl.zeros([T, T], tl.float32)
    if AHEAD:
        ready, older = tile_scores(
            farthest, 0, 0, older, qu, qw, base, key, distance, stride_kl, stride_dc, bh, H, i0, M, L, C, discount,
            D, BD, T, SLIDE, PRECISION, TMA, TABLE, DISCOUNT,
        )  # fmt: skip
        carry_back(base, 0, ready, T, SLIDE)
    after = complete + 1
    if SPLIT:
        after = tl.maximum(after, nearest)
    acc, top, total, older, ready = forward_span(
        acc, top, total, older, ready, 0, farthest, after, qu, qw, base, key, value, distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, H, i0, M, L, C, window, scale, dropout, discount,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, TMA, DISCOUNT, AHEAD, TABLE, False,
    )  # fmt: skip
    done, near = farthest - complete, 1
    if SPLIT:
        done, near = tl.maximum(farthest + 1 - after, 0), tl.maximum(nearest, 1)
    acc, top, total, older, ready = forward_span(
        acc, top, total, older, ready, done, complete, near, qu, qw, base, key, value, distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, H, i0, M, L, C, window, scale, dropout, discount,
        D, BD, T, False, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, TMA, DISCOUNT, AHEAD, TABLE, False,
    )  # fmt: skip
    own = 0
    if SPLIT:
        own = tl.minimum(farthest, 0)
    acc, top, total, older, ready = forward_span(
        acc, top, total, older, ready, farthest, own, nearest, qu, qw, base, key, value, distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, H, i0, M, L, C, window, scale, dropout, discount,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, TMA, DISCOUNT, AHEAD, TABLE, True,
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
