"""The backward pass with stored tiles: one kernel stores weights and gradients of the scores, others read them.

`storing_kernel` is the query kernel of fused_backward.py and also stores both, in bfloat16. `stored_key_kernel` then
needs two products per tile instead of six, and no shift: the position scores are not computed again. With three planes
the gradients are also stored by distance, and `stored_distance_kernel` sums those of the position table, so that the
first kernel has no atomics.

The tiles of some rows and some keys are stored at a time (stored.py). Columns of tiles count from the first key minus
`-M % T`, so that the diagonal is at the corner of a tile. If the keys of a row are split, the gradient of its queries
is summed in float32 between the launches.
"""

# ruff: noqa: SIM102 (the outer condition is known at compile time)

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_backward import query_span
from longspan.kernels.relative_attention.fused_forward import LENGTHS, load_distances, load_rows, reach
from longspan.kernels.relative_attention.fused_slide import (
    in_registers,
    keep_first,
    rolling_buffer,
)
from longspan.kernels.relative_attention.stored_tiles import column_at, load_sums, load_tile, store_sums


@triton.jit(do_not_specialize=[*LENGTHS, "first_slot", "first_tile", "end_tile", "blocks", "tiles"])
def storing_kernel(
    with_u, with_w, key, value, distance, grad, lse, delta, seed_ptr,
    stored, partial, grad_query, grad_distance, grad_biases,
    stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl, stride_dh, stride_dc,
    stride_gb, stride_gh, stride_gl, stride_qb, stride_qh, stride_ql,
    H, L, M, C, window, scale, score_scale, dropout, first_slot, first_tile, end_tile, blocks, tiles,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    SLIDE: tl.constexpr, PRECISION: tl.constexpr, PLANES: tl.constexpr, SPLIT: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """One block of queries and the tiles first_tile .. end_tile - 1: gradients of the queries and stored tiles."""
    if LONGEST:
        # The last block of every row first.
        slot = tl.program_id(0)
        block = blocks - 1 - tl.program_id(1)
    else:
        slot = tl.program_id(1)
        block = blocks - 1 - tl.program_id(0)
    bh = first_slot + slot
    b = (bh // H).to(tl.int64)
    h = bh % H
    i0 = block * T
    columns = tl.arange(0, BD)
    i = i0 + tl.arange(0, T)
    row = bh.to(tl.int64) * L
    qu = load_rows(with_u + slot.to(tl.int64) * L * D, i, D, L, D, BD)
    qw = load_rows(with_w + slot.to(tl.int64) * L * D, i, D, L, D, BD)
    g = load_rows(grad + b * stride_gb + h * stride_gh, i, stride_gl, L, D, BD)
    qu = in_registers(qu, scale, SLIDE)
    if BD <= 64:  # with wider heads the registers do not suffice for both
        g = in_registers(g, scale, SLIDE)
    row_lse = tl.load(lse + row + i, mask=i < L, other=float("inf"))
    row_delta = tl.load(delta + row + i, mask=i < L, other=0.0) * scale
    key += b * stride_kb + h * stride_kh
    value += b * stride_vb + h * stride_vh
    distance += h * stride_dh
    grad_distance += h * C * D
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    farthest, complete = reach(i0, M, L, window, None, T, WINDOW, False)
    # Tile n is at column own - n.
    own = (M + T - 1) // T + block
    near = 0
    if SPLIT:
        near = tl.maximum(own - end_tile + 1, 0)
        farthest = tl.minimum(farthest, own - first_tile)
        complete = tl.minimum(complete, farthest)
    stored += ((slot.to(tl.int64) * blocks + block) * tiles + own - first_tile) * (PLANES * T * T)

    base = rolling_buffer(T, SLIDE)
    r = load_distances(distance, (farthest + 1) * T - 1, stride_dc, C, D, BD, T)
    older = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
    # Entries of tile farthest+1 are not gradients, so they are zero.
    met = tl.arange(0, T)[:, None] + tl.arange(0, T)[None, :] >= T - 1
    keep_first(base, tl.where(met, older, 0.0), T, SLIDE)
    before = tl.zeros([T, T], tl.float32)
    total = tl.zeros([T, BD], tl.float32)
    sums = partial + (slot * blocks + block) * (T * BD)
    if SPLIT:
        if first_tile > 0:
            total = load_sums(sums, total, T, BD, SLIDE)
    total, older, before, r = query_span(
        total, older, before, r, 0, farthest, tl.maximum(complete + 1, near), qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_distance, None, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, True, WINDOW, False, DROPOUT, SLIDE, PRECISION, stored, PLANES,
    )  # fmt: skip
    done = tl.maximum(farthest - tl.maximum(complete, near - 1), 0)
    total, older, before, r = query_span(
        total, older, before, r, done, complete, tl.maximum(near, 1), qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_distance, None, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, False, WINDOW, False, DROPOUT, SLIDE, PRECISION, stored, PLANES,
    )  # fmt: skip
    # The diagonal tile. If keys follow, a tile of the next part without weights instead: it completes the gradients of
    # one more block of distances.
    end = 0
    if SPLIT:
        end = tl.maximum(near - 1, 0)
        row_lse = tl.where(near > 0, float("inf"), row_lse)
    total, older, before, r = query_span(
        total, older, before, r, tl.maximum(farthest - end, 0), end, end, qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_distance, None, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, True, WINDOW, False, DROPOUT, SLIDE, PRECISION, stored, PLANES,
    )  # fmt: skip
    if SPLIT:
        if near > 0:
            store_sums(sums, total, T, BD, SLIDE)

    # If keys follow, these are not complete, and are stored again.
    grad_query += b * stride_qb + h * stride_qh
    to = grad_query + i[:, None] * stride_ql + columns[None, :]
    tl.store(to, total.to(grad_query.dtype.element_ty), mask=(i < L)[:, None] & (columns < D)[None, :])
    tl.store(grad_biases + (bh * blocks + block) * D + columns, tl.sum(total, 0), mask=columns < D)


@triton.jit(do_not_specialize=["L", "M", "window", "first_slot", "first_tile", "blocks", "tiles", "columns_of_all"])
def stored_key_kernel(
    stored, with_u, grad, key, grad_key, grad_value, grad_u,
    stride_gb, stride_gh, stride_gl, stride_kb, stride_kh, stride_kl,
    stride_xb, stride_xh, stride_xl, stride_yb, stride_yh, stride_yl,
    H, L, M, window, first_slot, first_tile, blocks, tiles, columns_of_all,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, SLIDE: tl.constexpr,
    PRECISION: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values: products of stored tiles with queries and with gradients."""
    slot = tl.program_id(1)
    bh = first_slot + slot
    b = (bh // H).to(tl.int64)
    h = bh % H
    c = first_tile + tl.program_id(0)
    before = (M + T - 1) // T  # columns of tiles before the segment
    first = tl.maximum(c - before, 0)
    last = blocks - 1
    if WINDOW:
        last = tl.minimum(last, c - before + (window - 2 + T) // T)
    stored += (slot.to(tl.int64) * blocks * tiles + tl.program_id(0)) * (PLANES * T * T)
    with_u += slot.to(tl.int64) * L * D
    grad += b * stride_gb + h * stride_gh

    grad_k = tl.zeros([T, BD], tl.float32)
    grad_v = tl.zeros([T, BD], tl.float32)
    received = tl.zeros([T, 16], tl.float32)
    ones = tl.full([T, 16], 1.0, with_u.dtype.element_ty)
    for block in tl.range(first, last + 1):
        i = block * T + tl.arange(0, T)
        tile = stored + block * tiles * (PLANES * T * T)
        weights = load_tile(tile, T)
        g = load_rows(grad, i, stride_gl, L, D, BD)
        grad_v = tl.dot(tl.trans(weights), g, grad_v, input_precision=PRECISION)
        grads = load_tile(tile + T * T, T)
        qu = load_rows(with_u, i, D, L, D, BD)
        grad_k = tl.dot(tl.trans(grads), qu, grad_k, input_precision=PRECISION)
        received = tl.dot(tl.trans(grads), ones, received, input_precision=PRECISION)

    columns = tl.arange(0, BD)
    j = (c - before) * T + M + column_at(tl.arange(0, T), SLIDE)
    inside = (j >= 0) & (j < M + L)
    here = inside[:, None] & (columns < D)[None, :]
    grad_key += b * stride_xb + h * stride_xh
    grad_value += b * stride_yb + h * stride_yh
    element = grad_key.dtype.element_ty
    tl.store(grad_key + j[:, None] * stride_xl + columns[None, :], grad_k.to(element), mask=here)
    tl.store(grad_value + j[:, None] * stride_yl + columns[None, :], grad_v.to(element), mask=here)
    # The gradient of u is the sum of the keys, each weighted by the sum of its score gradients.
    k = load_rows(key + b * stride_kb + h * stride_kh, j, stride_kl, M + L, D, BD)
    share = tl.sum((tl.sum(received, 1) / 16)[:, None] * k.to(tl.float32), 0)
    tl.store(grad_u + (bh * columns_of_all + c) * D + columns, share, mask=columns < D)


@triton.jit(do_not_specialize=["L", "M", "C", "first_tile", "end_tile", "blocks", "rows", "tiles", "reached"])
def stored_distance_kernel(
    stored, with_w, grad_distance, H, L, M, C, first_tile, end_tile, blocks, rows, tiles, reached,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of T distances of a head, summed over `rows` rows of the batch and all blocks of queries.

    The tile n of a block of queries holds those of the distances from (n + 1) T - 1 down. `end_tile` is the last
    column that was stored, plus one; `reached` is the farthest tile.
    """
    h = tl.program_id(1)
    before = (M + T - 1) // T
    # Column c of block q is tile n = before + q - c.
    n = before + blocks - 1 - first_tile - tl.program_id(0)
    first = tl.maximum(first_tile + n - before, 0)
    last = tl.minimum(end_tile - 1 + n - before, blocks - 1)
    count = tl.maximum(last - first + 1, 0)
    if n > reached:
        count = 0
    parts = tl.num_programs(2)
    share = tl.cdiv(rows, parts)
    from_row = tl.program_id(2) * share
    to_row = tl.minimum(from_row + share, rows)
    total = tl.zeros([T, BD], tl.float32)
    for step in tl.range(from_row * count, to_row * count):
        slot = (step // count * H + h).to(tl.int64)
        block = first + step % count
        c = before + block - n - first_tile
        by_distance = load_tile(stored + (((slot * blocks + block) * tiles + c) * 3 + 2) * (T * T), T)
        qw = load_rows(with_w + slot * L * D, block * T + tl.arange(0, T), D, L, D, BD)
        total = tl.dot(tl.trans(by_distance), qw, total, input_precision=PRECISION)
    columns = tl.arange(0, BD)
    gap = (n + 1) * T - 1 - column_at(tl.arange(0, T), SLIDE)
    here = (gap >= 0) & (gap < M + L) & (count > 0)
    at = grad_distance + h * C * D + tl.maximum(C - 1 - gap, 0)[:, None] * D + columns[None, :]
    tl.atomic_add(at, total, mask=here[:, None] & (columns < D)[None, :], sem="relaxed")
