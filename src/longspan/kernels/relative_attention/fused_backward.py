"""The backward pass: shared inputs, then queries and distances, then keys and values. last_sum_kernels.py ends it."""

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_forward import (
    LENGTHS,
    far_loss,
    kept,
    load_distances,
    load_rows,
    reach,
    share_of,
    visible,
)
from longspan.kernels.relative_attention.fused_slide import (
    GATHER,
    add_rows,
    carry_back,
    in_registers,
    keep_block,
    keep_first,
    rolling_buffer,
    slide,
    slide_tall,
    tall,
    unslide,
)
from longspan.kernels.relative_attention.stored_tiles import store_tile


@triton.jit(do_not_specialize=["L"])
def prepare_kernel(
    query, u, w, out, grad, with_u, with_w, delta,
    stride_qb, stride_qh, stride_ql, stride_ob, stride_oh, stride_ol, stride_gb, stride_gh, stride_gl,
    H, L, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """q + w, unless `with_u` is None also q + u, and per query the sum of out * grad."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    i = tl.program_id(0) * T + tl.arange(0, T)
    columns = tl.arange(0, BD)
    here = (i < L)[:, None] & (columns < D)[None, :]
    q = load_rows(query + b * stride_qb + h * stride_qh, i, stride_ql, L, D, BD)
    to = (bh.to(tl.int64) * L + i[:, None]) * D + columns[None, :]
    bias = tl.load(w + h * D + columns, mask=columns < D, other=0.0)[None, :]
    tl.store(with_w + to, (q + bias).to(q.dtype), mask=here)
    if with_u is not None:
        bias = tl.load(u + h * D + columns, mask=columns < D, other=0.0)[None, :]
        tl.store(with_u + to, (q + bias).to(q.dtype), mask=here)
    o = load_rows(out + b * stride_ob + h * stride_oh, i, stride_ol, L, D, BD).to(tl.float32)
    g = load_rows(grad + b * stride_gb + h * stride_gh, i, stride_gl, L, D, BD).to(tl.float32)
    tl.store(delta + bh * L + i, tl.sum(o * g, 1), mask=i < L)


@triton.jit
def query_span(
    total, older, before, r_older, done, far, near, qu, qw, g, lse, delta, base,
    key, value, distance, grad_distance, first, seed,
    stride_key, stride_value, stride_distance, bh, i0, M, L, C, window, scale, score_scale, dropout,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr,
    stored=None, PLANES: tl.constexpr = 0, discount=0.0, DISCOUNT: tl.constexpr = False,
):  # fmt: skip
    """Tiles far, far-1, ..., near of one block of queries. The gradient of a distance is complete after two tiles.

    With PLANES, tile n is also stored, n places before `stored`: the weights, the gradients of the scores, and with
    three planes those by distance (stored_backward.py).
    """
    K = M + L
    i = i0 + tl.arange(0, T)
    if FIRST and MASKED:
        oldest = tl.load(first + i, mask=i < L, other=0)[:, None]
    else:
        oldest = 0
    for step in tl.range(0, far - near + 1, disable_licm=True):
        n = far - step
        j = M + i0 - n * T + tl.arange(0, T)
        r = load_distances(distance, n * T - 1, stride_distance, C, D, BD, T)
        newer = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
        if DISCOUNT:
            newer -= far_loss(n, C, discount, T, SLIDE)[None, :]
        keep_block(base, done + step, newer, T, SLIDE)
        k = load_rows(key, j, stride_key, K, D, BD)
        scores = tl.dot(qu, tl.trans(k), slide(base, done + step, older, newer, T, SLIDE), input_precision=PRECISION)
        weights = tl.exp2(scores * score_scale - lse[:, None])
        if SLIDE == GATHER:
            older = newer
        if MASKED:
            seen = visible(i[:, None], j[None, :], M, window, oldest, WINDOW, FIRST)
            weights = tl.where(seen, weights, 0.0)
        v = load_rows(value, j, stride_value, K, D, BD)
        grads = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        used = weights
        if DROPOUT:
            keep = kept(seed, bh, i[:, None], j[None, :], K, dropout)
            grads = tl.where(keep, grads / (1 - dropout), 0.0)
            if PLANES > 0:
                used = tl.where(keep, weights / (1 - dropout), 0.0)
        if PLANES > 0:
            store_tile(stored - n * (PLANES * T * T), used.to(k.dtype), 0, T, SLIDE)
        grads = weights * (grads * scale - delta[:, None])
        if PLANES > 0:
            store_tile(stored - n * (PLANES * T * T), grads.to(k.dtype), 1, T, SLIDE)
        total = tl.dot(grads.to(k.dtype), k, total, input_precision=PRECISION)
        by_distance = unslide(grads, base, done + step, before, T, SLIDE).to(k.dtype)
        if SLIDE == GATHER:
            before = grads
        gap = (n + 1) * T - 1 - tl.arange(0, T)
        total = tl.dot(by_distance, r_older, total, input_precision=PRECISION)
        r_older = r
        if PLANES > 2:
            store_tile(stored - n * (PLANES * T * T), by_distance, 2, T, SLIDE)
        else:
            # Every block of queries of every row adds here, so this sum uses atomics.
            of_r = tl.dot(tl.trans(by_distance), qw, input_precision=PRECISION)
            add_rows(grad_distance, tl.maximum(C - 1 - gap, 0), of_r, gap < K, D, BD, SLIDE)
        carry_back(base, done + step, grads, T, SLIDE)
    return total, older, before, r_older


@triton.jit(do_not_specialize=LENGTHS)
def query_kernel(
    query, u, with_w, key, value, distance, grad, lse, delta, first, seed_ptr,
    grad_query, grad_distance, grad_biases,
    stride_ib, stride_ih, stride_il, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_dh, stride_dc, stride_gb, stride_gh, stride_gl, stride_qb, stride_qh, stride_ql,
    H, L, M, C, window, scale, score_scale, dropout, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr,
    DISCOUNT: tl.constexpr, SPLIT: tl.constexpr = False,
):  # fmt: skip
    """Gradients of one block of queries, and its contributions to those of u + w and of the distances.

    With SPLIT, those from a part of its keys.
    """
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    i0 = block * T
    columns = tl.arange(0, BD)
    i = i0 + tl.arange(0, T)
    row = bh.to(tl.int64) * L
    q = in_registers(load_rows(query + b * stride_ib + h * stride_ih, i, stride_il, L, D, BD), scale, SLIDE)
    qu = (q + tl.load(u + h * D + columns, mask=columns < D, other=0.0)[None, :]).to(q.dtype)
    qw = load_rows(with_w + row * D, i, D, L, D, BD)
    g = load_rows(grad + b * stride_gb + h * stride_gh, i, stride_gl, L, D, BD)
    g = in_registers(g, scale, SLIDE)
    row_lse = tl.load(lse + row + i, mask=i < L, other=float("inf"))
    row_delta = tl.load(delta + row + i, mask=i < L, other=0.0) * scale
    key += b * stride_kb + h * stride_kh
    value += b * stride_vb + h * stride_vh
    distance += h * stride_dh
    grad_distance += h * C * D
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
    if DISCOUNT:
        older -= far_loss(farthest + 1, C, discount, T, SLIDE)[None, :]
    # Entries of tile farthest+1 are not gradients, so they are zero.
    met = tl.arange(0, T)[:, None] + tl.arange(0, T)[None, :] >= T - 1
    keep_first(base, tl.where(met, older, 0.0), T, SLIDE)
    before = tl.zeros([T, T], tl.float32)
    total = tl.zeros([T, BD], tl.float32)
    after = complete + 1
    if SPLIT:
        after = tl.maximum(after, nearest)
    total, older, before, r = query_span(
        total, older, before, r, 0, farthest, after, qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, discount=discount, DISCOUNT=DISCOUNT,
    )  # fmt: skip
    done, near = farthest - complete, 1
    if SPLIT:
        done, near = tl.maximum(farthest + 1 - after, 0), tl.maximum(nearest, 1)
    total, older, before, r = query_span(
        total, older, before, r, done, complete, near, qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, False, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, discount=discount, DISCOUNT=DISCOUNT,
    )  # fmt: skip
    done, end = farthest, 0
    if SPLIT:
        # If nearer tiles follow, the first of them without weights: it completes the gradients of a block of distances.
        end = tl.maximum(nearest - 1, 0)
        done = tl.maximum(farthest - end, 0)
        row_lse = tl.where((nearest > 0) | (farthest < 0), float("inf"), row_lse)
    total, older, before, r = query_span(
        total, older, before, r, done, end, end, qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, discount=discount, DISCOUNT=DISCOUNT,
    )  # fmt: skip

    slot = bh
    if SPLIT:
        # Results of all parts are contiguous.
        slot += tl.program_id(2) * tl.num_programs(1)
        grad_query += tl.program_id(2).to(tl.int64) * tl.num_programs(1) * L * D
    grad_query += b * stride_qb + h * stride_qh
    tl.store(
        grad_query + i[:, None] * stride_ql + columns[None, :],
        total.to(grad_query.dtype.element_ty),
        mask=(i < L)[:, None] & (columns < D)[None, :],
    )
    share = (slot * tl.num_programs(0) + block) * D + columns
    tl.store(grad_biases + share, tl.sum(total, 0), mask=columns < D)


@triton.jit
def key_span(
    grad_k, grad_v, received, near, far, k, v, base, with_u, with_w, grad, distance, lse, delta, first, seed,
    stride_grad, stride_distance, bh, j0, M, L, C, window, scale, score_scale, dropout, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr, DISCOUNT: tl.constexpr,
):  # fmt: skip
    """Tiles near, near+1, ..., far of one block of keys; here rows are keys and columns are queries.

    q + u is rounded as in the forward pass. Computing it from q + w would round it differently, and a difference of a
    score is a factor of its weight: in bfloat16 far above 1 for large scores.
    """
    j = j0 + tl.arange(0, T)
    for n in tl.range(near, far + 1, disable_licm=True):
        i = j0 - M + n * T + tl.arange(0, T)
        inside = (i >= 0) & (i < L)
        qw = load_rows(with_w, i, D, L, D, BD)
        qu = load_rows(with_u, i, D, L, D, BD)
        r = load_distances(distance, n * T - 1, stride_distance, C, D, BD, T)
        newer = tl.dot(r, tl.trans(qw), input_precision=PRECISION)
        # Loaded again in the next tile: carried in registers, it would be unpacked and packed again.
        r = load_distances(distance, (n + 1) * T - 1, stride_distance, C, D, BD, T)
        older = tl.dot(r, tl.trans(qw), input_precision=PRECISION)
        if DISCOUNT:
            newer -= far_loss(n, C, discount, T, SLIDE)[:, None]
            older -= far_loss(n + 1, C, discount, T, SLIDE)[:, None]
        scores = tl.dot(k, tl.trans(qu), slide_tall(base, older, newer, T, SLIDE), input_precision=PRECISION)
        row_lse = tl.load(lse + i, mask=inside, other=float("inf"))
        weights = tl.exp2(scores * score_scale - row_lse[None, :])
        if MASKED:
            oldest = 0
            if FIRST:
                oldest = tl.load(first + i, mask=inside, other=0)[None, :]
            seen = visible(i[None, :], j[:, None], M, window, oldest, WINDOW, FIRST)
            weights = tl.where(seen, weights, 0.0)
        g = load_rows(grad, i, stride_grad, L, D, BD)
        grads = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        used = weights
        if DROPOUT:
            keep = kept(seed, bh, i[None, :], j[:, None], M + L, dropout)
            used = tl.where(keep, weights / (1 - dropout), 0.0)
            grads = tl.where(keep, grads / (1 - dropout), 0.0)
        grad_v = tl.dot(used.to(g.dtype), g, grad_v, input_precision=PRECISION)
        row_delta = tl.load(delta + i, mask=inside, other=0.0) * scale
        grads = weights * (grads * scale - row_delta[None, :])
        received += tl.sum(grads, 1)
        grad_k = tl.dot(grads.to(qu.dtype), qu, grad_k, input_precision=PRECISION)
    return grad_k, grad_v, received


# Specialised on L and M: if they are multiples of 16, rows of lse and delta are loaded in wider vectors.
@triton.jit(do_not_specialize=["C", "window"])
def key_kernel(
    with_u, with_w, key, value, distance, grad, lse, delta, first, seed_ptr, grad_key, grad_value, grad_u,
    stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl, stride_dh, stride_dc,
    stride_gb, stride_gh, stride_gl, stride_xb, stride_xh, stride_xl, stride_yb, stride_yh, stride_yl,
    H, L, M, C, window, scale, score_scale, dropout, discount,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr, DISCOUNT: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    j0 = tl.program_id(0) * T
    j = j0 + tl.arange(0, T)
    columns = tl.arange(0, BD)
    row = bh.to(tl.int64) * L
    k = load_rows(key + b * stride_kb + h * stride_kh, j, stride_kl, M + L, D, BD)
    v = load_rows(value + b * stride_vb + h * stride_vh, j, stride_vl, M + L, D, BD)
    with_u += row * D
    with_w += row * D
    lse += row
    delta += row
    grad += b * stride_gb + h * stride_gh
    distance += h * stride_dh
    if FIRST:
        first += b * L
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    base = tall(T, SLIDE)
    # Tile n has the queries from j0 - M + n T on: the first tile that reaches the segment, the last that starts in it.
    near = tl.maximum(M - j0, 0) // T
    far = (L - 1 + M - j0) // T
    complete = far
    if WINDOW:
        far = tl.minimum(far, (window - 2 + T) // T)
        complete = tl.minimum(far, tl.maximum(window - T, 0) // T)
    grad_k = tl.zeros([T, BD], tl.float32)
    grad_v = tl.zeros([T, BD], tl.float32)
    received = tl.zeros([T], tl.float32)
    if FIRST:
        complete = 0
    # The diagonal tile, then tiles that every query sees, then tiles that only some see.
    grad_k, grad_v, received = key_span(
        grad_k, grad_v, received, near, tl.minimum(far, 0), k, v, base,
        with_u, with_w, grad, distance, lse, delta, first, seed,
        stride_gl, stride_dc, bh, j0, M, L, C, window, scale, score_scale, dropout, discount,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, DISCOUNT,
    )  # fmt: skip
    near = tl.maximum(near, 1)
    if not FIRST:
        grad_k, grad_v, received = key_span(
            grad_k, grad_v, received, near, complete, k, v, base, with_u, with_w, grad, distance, lse, delta, first,
            seed, stride_gl, stride_dc, bh, j0, M, L, C, window, scale, score_scale, dropout, discount,
            D, BD, T, False, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, DISCOUNT,
        )  # fmt: skip
    if FIRST or WINDOW:
        grad_k, grad_v, received = key_span(
            grad_k, grad_v, received, tl.maximum(near, complete + 1), far, k, v, base,
            with_u, with_w, grad, distance, lse, delta, first, seed,
            stride_gl, stride_dc, bh, j0, M, L, C, window, scale, score_scale, dropout, discount,
            D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, DISCOUNT,
        )  # fmt: skip

    here = (j < M + L)[:, None] & (columns < D)[None, :]
    grad_key += b * stride_xb + h * stride_xh
    grad_value += b * stride_yb + h * stride_yh
    element = grad_key.dtype.element_ty
    received = tl.where(j < M + L, received, 0.0)[:, None]
    tl.store(grad_key + j[:, None] * stride_xl + columns[None, :], grad_k.to(element), mask=here)
    tl.store(grad_value + j[:, None] * stride_yl + columns[None, :], grad_v.to(element), mask=here)
    # The gradient of u is the sum of the keys, each weighted by the sum of its score gradients.
    share = tl.sum(received * k.to(tl.float32), 0)
    tl.store(grad_u + (bh * tl.num_programs(0) + tl.program_id(0)) * D + columns, share, mask=columns < D)
