"""The backward pass with stored tiles: some programs store tiles, others read them.

A cell is a part of the keys of one row and head (a slot). Its P producers, one per block of queries, are the query
kernel of fused_backward.py and also store weights and gradients of the scores, in bfloat16. Its readers then need two
products per tile instead of six, and no shift: the position scores are not computed again. With three planes the
gradients are also stored by distance, and more readers sum those of the position table, so that producers have no
atomics.

In one launch, programs take tickets, so they start in the order of the tickets, and a program waits only for smaller
tickets: waits end. Cells are in the order (part of the keys, slot). The readers of a cell come LAG cells after its
producers, so that they rarely wait and run beside producers of later cells. The tiles of R cells are stored at a time,
in a ring: a producer waits until the cell that was stored in its place has been read. With a launch per role, the order
of the launches replaces tickets and waits.

Columns of tiles count from the first key minus `-M % T`, so that the diagonal is at the corner of a tile. If the keys
are split, the gradient of the queries is summed in float32 from one part to the next.
"""

# ruff: noqa: SIM102 (the outer condition is known at compile time)

import triton
import triton.language as tl

from longspan.kernels.relative_attention import stored
from longspan.kernels.relative_attention.fused_backward import query_span
from longspan.kernels.relative_attention.fused_forward import LENGTHS, load_distances, load_rows, reach
from longspan.kernels.relative_attention.fused_slide import (
    in_registers,
    keep_first,
    rolling_buffer,
)
from longspan.kernels.relative_attention.stored_flags import count_one, take_ticket, wait_until
from longspan.kernels.relative_attention.stored_tiles import column_at, load_sums, load_tile, prefetch, store_sums

BOTH, PRODUCER, READER = tl.constexpr(stored.BOTH), tl.constexpr(stored.PRODUCER), tl.constexpr(stored.READER)


@triton.jit
def produce(
    query, u, with_w, key, value, distance, grad, lse, delta, seed_ptr,
    stored, partial, grad_query, grad_distance, grad_biases, ready, wanted, tickets,
    stride_il, stride_kl, stride_vl, stride_dc, stride_gl, stride_ql,
    bh, block, L, M, C, window, scale, score_scale, dropout, first_tile, end_tile, blocks, tiles,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    SLIDE: tl.constexpr, PRECISION: tl.constexpr, PLANES: tl.constexpr, SPLIT: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One block of queries and the tiles first_tile .. end_tile - 1: gradients of the queries and stored tiles."""
    i0 = block * T
    columns = tl.arange(0, BD)
    i = i0 + tl.arange(0, T)
    row = bh.to(tl.int64) * L
    q = load_rows(query, i, stride_il, L, D, BD)
    g = load_rows(grad, i, stride_gl, L, D, BD)
    if BD <= 64:  # with wider heads the registers do not suffice
        q, g = in_registers(q, scale, SLIDE), in_registers(g, scale, SLIDE)
    qu = (q + tl.load(u + columns, mask=columns < D, other=0.0)[None, :]).to(q.dtype)
    qw = load_rows(with_w + row * D, i, D, L, D, BD)
    row_lse = tl.load(lse + row + i, mask=i < L, other=float("inf"))
    row_delta = tl.load(delta + row + i, mask=i < L, other=0.0) * scale
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
    stored += (block * tiles + own - first_tile) * (PLANES * T * T)

    base = rolling_buffer(T, SLIDE)
    r = load_distances(distance, (farthest + 1) * T - 1, stride_dc, C, D, BD, T)
    older = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
    # Entries of tile farthest+1 are not gradients, so they are zero.
    met = tl.arange(0, T)[:, None] + tl.arange(0, T)[None, :] >= T - 1
    keep_first(base, tl.where(met, older, 0.0), T, SLIDE)
    before = tl.zeros([T, T], tl.float32)
    total = tl.zeros([T, BD], tl.float32)
    sums = partial + (bh.to(tl.int64) * blocks + block) * (T * BD)
    if SPLIT:
        if first_tile > 0:
            zero = 0
            if WAITS:
                zero = wait_until(ready, wanted, tickets, grad_distance, SLIDE)
            total = load_sums(sums + zero, total, T, BD, SLIDE)
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
    # If keys follow, the gradients are not complete.
    if near > 0:
        store_sums(sums, total, T, BD, SLIDE)
    else:
        to = grad_query + i[:, None] * stride_ql + columns[None, :]
        tl.store(to, total.to(grad_query.dtype.element_ty), mask=(i < L)[:, None] & (columns < D)[None, :])
        tl.store(grad_biases + (bh * blocks + block) * D + columns, tl.sum(total, 0), mask=columns < D)


@triton.jit
def bias_change(u, w, D: tl.constexpr, BD: tl.constexpr):
    """u - w of one head, as a row."""
    columns = tl.arange(0, BD)
    first = tl.load(u + columns, mask=columns < D, other=0.0).to(tl.float32)
    return (first - tl.load(w + columns, mask=columns < D, other=0.0).to(tl.float32))[None, :]


@triton.jit
def read_keys(
    stored, u, w, with_w, grad, key, grad_key, grad_value, grad_u,
    stride_gl, stride_kl, stride_xl, stride_yl, bh, c, L, M, window, first_tile, blocks, tiles, all_tiles,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, SLIDE: tl.constexpr,
    PRECISION: tl.constexpr, PLANES: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values: products of stored tiles with queries and with gradients.

    A loop for each needs half of the shared memory per stage that one loop for both would need.
    """
    before = (M + T - 1) // T  # columns of tiles before the segment
    first = tl.maximum(c - before, 0)
    last = blocks - 1
    if WINDOW:
        last = tl.minimum(last, c - before + (window - 2 + T) // T)
    stored += (c - first_tile) * (PLANES * T * T)
    if PREFETCH:
        step = tiles * (PLANES * T * T)
        prefetch(stored + first * step, step, last + 1 - first, 2, T, SLIDE)
    with_w += bh.to(tl.int64) * L * D
    columns = tl.arange(0, BD)
    j = (c - before) * T + M + column_at(tl.arange(0, T), SLIDE)
    here = ((j >= 0) & (j < M + L))[:, None] & (columns < D)[None, :]
    element = grad_key.dtype.element_ty

    grad_v = tl.zeros([T, BD], tl.float32)
    for block in tl.range(first, last + 1, num_stages=STAGES):
        weights = load_tile(stored + block * tiles * (PLANES * T * T), T)
        g = load_rows(grad, block * T + tl.arange(0, T), stride_gl, L, D, BD)
        grad_v = tl.dot(tl.trans(weights), g, grad_v, input_precision=PRECISION)
    tl.store(grad_value + j[:, None] * stride_yl + columns[None, :], grad_v.to(element), mask=here)

    grad_k = tl.zeros([T, BD], tl.float32)
    received = tl.zeros([T, 16], tl.float32)
    # A constant would occupy shared memory from the start of the kernel on, in all roles.
    ones = tl.broadcast_to((tl.arange(0, T)[:, None] + c >= 0).to(element), [T, 16])
    for block in tl.range(first, last + 1, num_stages=STAGES):
        grads = load_tile(stored + (block * tiles * PLANES + 1) * (T * T), T)
        qw = load_rows(with_w, block * T + tl.arange(0, T), D, L, D, BD)
        grad_k = tl.dot(tl.trans(grads), qw, grad_k, input_precision=PRECISION)
        received = tl.dot(tl.trans(grads), ones, received, input_precision=PRECISION)
    received = tl.sum(received, 1)[:, None] / 16
    grad_k += received * bias_change(u, w, D, BD)  # so far it was due to q + w instead of q + u
    tl.store(grad_key + j[:, None] * stride_xl + columns[None, :], grad_k.to(element), mask=here)
    # The gradient of u is the sum of the keys, each weighted by the sum of its score gradients.
    k = load_rows(key, j, stride_kl, M + L, D, BD)
    share = tl.sum(received * k.to(tl.float32), 0)
    tl.store(grad_u + (bh * all_tiles + c) * D + columns, share, mask=columns < D)


@triton.jit
def read_distances(
    stored, with_w, grad_distance, bh, n, L, M, C, window, first_tile, end_tile, blocks, tiles,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, SLIDE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of T distances of a cell, summed over the blocks of queries.

    The tile n of a block of queries holds those of the distances from (n + 1) T - 1 down. `end_tile` is the last
    column that was stored, plus one.
    """
    before = (M + T - 1) // T
    # Column c of block q is tile n = before + q - c.
    first = tl.maximum(first_tile + n - before, 0)
    last = tl.minimum(end_tile - 1 + n - before, blocks - 1)
    last = tl.where(n < 0, -1, last)
    if WINDOW:
        last = tl.where(n > (window - 2 + T) // T, -1, last)
    if PREFETCH:
        tile = first * tiles + before + first - n - first_tile
        prefetch(stored + (tile * 3 + 2) * (T * T), (tiles + 1) * (3 * T * T), last + 1 - first, 1, T, SLIDE)
    with_w += bh.to(tl.int64) * L * D
    total = tl.zeros([T, BD], tl.float32)
    for block in tl.range(first, last + 1, num_stages=STAGES):
        c = before + block - n - first_tile
        by_distance = load_tile(stored + ((block * tiles + c) * 3 + 2) * (T * T), T)
        qw = load_rows(with_w, block * T + tl.arange(0, T), D, L, D, BD)
        total = tl.dot(tl.trans(by_distance), qw, total, input_precision=PRECISION)
    if first <= last:
        columns = tl.arange(0, BD)
        gap = (n + 1) * T - 1 - column_at(tl.arange(0, T), SLIDE)
        at = grad_distance + tl.maximum(C - 1 - gap, 0)[:, None] * D + columns[None, :]
        tl.atomic_add(at, total, mask=(gap < M + L)[:, None] & (columns < D)[None, :], sem="relaxed")


CELLS = ("slots", "cells", "lag", "ring", "blocks", "tiles", "all_tiles", "first_cell")


@triton.jit(do_not_specialize=[*LENGTHS, *CELLS])
def stored_kernel(
    query, u, w, with_w, key, value, distance, grad, lse, delta, seed_ptr,
    stored, partial, flags, grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u,
    stride_ib, stride_ih, stride_il, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_dh, stride_dc, stride_gb, stride_gh, stride_gl, stride_qb, stride_qh, stride_ql,
    stride_xb, stride_xh, stride_xl, stride_yb, stride_yh, stride_yl,
    H, L, M, C, window, scale, score_scale, dropout, slots, cells, lag, ring, blocks, tiles, all_tiles,
    first_cell,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    SLIDE: tl.constexpr, PRECISION: tl.constexpr, PLANES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, ROLE: tl.constexpr,
):  # fmt: skip
    """One program of a cell. `flags` are the next ticket, and per cell how many producers and readers are done. In a
    launch of one role, axis 0 is the number of the producer or reader and axis 1 the cell."""
    readers = tiles
    if PLANES == 3:
        readers += tiles + blocks
    if ROLE == BOTH:
        cell, role = take_ticket(flags, cells, lag, blocks, readers)
        place = cell % ring
    else:
        place = tl.program_id(1)
        cell = first_cell + place
        role = tl.program_id(0)
        if ROLE == READER:
            role += blocks
    ready, done = flags + 4, flags + 4 + cells
    bh = cell % slots
    b = (bh // H).to(tl.int64)
    h = bh % H
    first_tile = cell // slots * tiles
    end_tile = tl.minimum(first_tile + tiles, all_tiles)
    # The last column is for the gradients by distance that a part leaves to the next one.
    columns = tiles
    if SPLIT:
        columns += 1
    stored += place.to(tl.int64) * blocks * columns * (PLANES * T * T)
    query += b * stride_ib + h * stride_ih
    u += h * D
    w += h * D
    key += b * stride_kb + h * stride_kh
    grad += b * stride_gb + h * stride_gh
    of_head = grad_distance + h * C * D
    if ROLE != READER:
        if (role >= 0) & (role < blocks):
            # The last block sees the most keys, so it starts first.
            block = blocks - 1 - role
            if (M + T - 1) // T + block >= first_tile:
                if ROLE == BOTH:
                    if cell >= ring:
                        wait_until(done + cell - ring, readers, flags, grad_distance, SLIDE)
                produce(
                    query, u, with_w, key, value + b * stride_vb + h * stride_vh, distance + h * stride_dh,
                    grad, lse, delta, seed_ptr, stored, partial, grad_query + b * stride_qb + h * stride_qh,
                    of_head, grad_biases, ready + cell - slots, blocks, flags,
                    stride_il, stride_kl, stride_vl, stride_dc, stride_gl, stride_ql,
                    bh, block, L, M, C, window, scale, score_scale, dropout, first_tile, end_tile, blocks, columns,
                    D, BD, T, WINDOW, DROPOUT, SLIDE, PRECISION, PLANES, SPLIT, ROLE == BOTH,
                )  # fmt: skip
            if ROLE == BOTH:
                count_one(ready + cell)
    if ROLE != PRODUCER:
        if role >= blocks:
            reader = role - blocks
            if ROLE == BOTH:
                wait_until(ready + cell, blocks, flags, grad_distance, SLIDE)
            if reader < tiles:
                if first_tile + reader < end_tile:
                    read_keys(
                        stored, u, w, with_w, grad, key, grad_key + b * stride_xb + h * stride_xh,
                        grad_value + b * stride_yb + h * stride_yh, grad_u, stride_gl, stride_kl, stride_xl, stride_yl,
                        bh, first_tile + reader, L, M, window, first_tile, blocks, columns, all_tiles,
                        D, BD, T, WINDOW, SLIDE, PRECISION, PLANES, STAGES, PREFETCH,
                    )  # fmt: skip
            elif PLANES == 3:
                n = (M + T - 1) // T + blocks - 1 - first_tile - (reader - tiles)
                read_distances(
                    stored, with_w, of_head, bh, n, L, M, C, window, first_tile,
                    tl.where(end_tile < all_tiles, end_tile + 1, end_tile), blocks, columns,
                    D, BD, T, WINDOW, SLIDE, PRECISION, STAGES, PREFETCH,
                )  # fmt: skip
            if ROLE == BOTH:
                count_one(done + cell)
