"""A backward pass of relative attention in one kernel, as a variant of attention_variants.py.

Keys stay, and the gradients of queries are added to float32 sums by atomics, as those of distances are: 11 products per
tile instead of 12, one softmax instead of two. Per tile of 64 by 64, 32 KB are read instead of 56, and 32 KB are added
in the L2 cache instead of 16.
"""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.relative_attention import fused_slide
from longspan.kernels.relative_attention.fused import LOG2E, empty_heads, launch, padded
from longspan.kernels.relative_attention.fused_backward import prepare_kernel
from longspan.kernels.relative_attention.fused_forward import (
    LENGTHS,
    kept,
    load_distances,
    load_rows,
    visible,
)
from longspan.kernels.relative_attention.fused_slide import (
    GATHER,
    HALF,
    add_rows,
    keep_block,
    keep_first,
    rolling_buffer,
    slide,
)
from longspan.kernels.relative_attention.slide_ptx import PUT_GRADS, PUT_WITH, TAKE_GRADS, TAKE_GRADS_WITH

fused_slide.WINDOWED.add("keyed_kernel")


@dataclass(frozen=True)
class Keyed:
    """Launch options."""

    stages: int = 2
    registers: int | None = None

    def backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, distance: Tensor,
        u: Tensor, w: Tensor, seed: Tensor | None, window: int, dropout: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients of query, key, value and distance, and shares of those of u + w and of u."""
        B, H, L, D = query.shape
        K, C, BD = key.shape[2], distance.shape[1], padded(D)
        how = launch("key", query, K)
        T = how.T
        with_w, delta = torch.empty_like(query, memory_format=torch.contiguous_format), torch.empty_like(lse)
        prepare_kernel[(-(-L // 64), B * H)](
            query, w.contiguous(), out, grad, with_w, delta,
            *query.stride()[:3], *out.stride()[:3], *grad.stride()[:3], H, L, D=D, BD=BD, T=64,
        )  # fmt: skip
        sums = query.new_zeros(H * C + B * H * L, D, dtype=torch.float32)
        grad_distance, of_query = sums[: H * C].view(H, C, D), sums[H * C :]
        grad_query, grad_key, grad_value = empty_heads(query, L), empty_heads(key, K), empty_heads(value, K)
        grad_u = query.new_empty(B, H, -(-K // T), D, dtype=torch.float32)
        grad_biases = query.new_empty(B, H, -(-L // 64), D, dtype=torch.float32)
        keyed_kernel[(-(-K // T), B * H)](
            u.contiguous(), w.contiguous(), with_w, key, value, distance, grad, lse, delta, seed,
            of_query, grad_key, grad_value, grad_distance, grad_u,
            *key.stride()[:3], *value.stride()[:3], *distance.stride()[:2], *grad.stride()[:3],
            *grad_key.stride()[:3], *grad_value.stride()[:3],
            H, L, K - L, C, window, D**-0.5, LOG2E * D**-0.5, dropout,
            D=D, BD=BD, T=T, WINDOW=window > 0, DROPOUT=dropout > 0.0, SLIDE=how.slide,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=how.num_warps, num_stages=self.stages,
            **({} if self.registers is None else {"maxnreg": self.registers}),
        )  # fmt: skip
        convert_kernel[(-(-L // 64), B * H)](
            of_query, grad_query, grad_biases, *grad_query.stride()[:3], H, L, D=D, BD=BD, T=64
        )
        return grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u


@triton.jit
def both_by_distance(grads, base, T: tl.constexpr, SLIDE: tl.constexpr):
    """Gradients [query, distance] of both blocks of distances of a tile; zero where they are not of this tile."""
    ii, tt = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    in_older = ii + tt >= T - 1
    if SLIDE == GATHER:
        older = tl.gather(grads, tl.maximum(ii + tt - (T - 1), 0), 1)
        newer = tl.gather(grads, tl.minimum(ii + tt + 1, T - 1), 1)
    else:
        tl.static_assert(SLIDE == HALF)
        fused_slide.barrier(SLIDE)
        to = fused_slide.key_address(base, T, SLIDE)
        tl.inline_asm_elementwise(PUT_GRADS, PUT_WITH, [grads, to], tl.int32, False, 32)
        fused_slide.barrier(SLIDE)
        old, new = fused_slide.window_address(base, 0, T, SLIDE), fused_slide.window_address(base, 1, T, SLIDE)
        older = tl.inline_asm_elementwise(TAKE_GRADS, TAKE_GRADS_WITH, [grads, old], tl.bfloat16, False, 32)
        newer = tl.inline_asm_elementwise(TAKE_GRADS, TAKE_GRADS_WITH, [grads, new], tl.bfloat16, False, 32)
    zero = tl.zeros([T, T], older.dtype)
    return tl.where(in_older, older, zero), tl.where(in_older, zero, newer)


@triton.jit
def keyed_span(
    grad_k, grad_v, received, of_r, near, far, k, v, ones, base, shift, with_w, grad, distance, lse, delta, seed,
    grad_query, grad_distance, stride_grad, stride_distance, bh, j0, M, L, C, window, scale, score_scale, dropout,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles near, near+1, ..., far of one block of keys. `of_r` are the gradients of the newer distances of tile `near`
    from the tile before. Scores use (q + u) k = (q + w) k + shift, so q + u is not needed."""
    j = j0 + tl.arange(0, T)
    for n in tl.range(near, far + 1, disable_licm=True):
        i = j0 - M + n * T + tl.arange(0, T)
        inside = (i >= 0) & (i < L)
        qw = load_rows(with_w, i, D, L, D, BD)
        r_newer = load_distances(distance, n * T - 1, stride_distance, C, D, BD, T)
        newer = tl.dot(qw, tl.trans(r_newer), input_precision=PRECISION)
        keep_block(base, 0, newer, T, SLIDE)
        r_older = load_distances(distance, (n + 1) * T - 1, stride_distance, C, D, BD, T)
        older = tl.dot(qw, tl.trans(r_older), input_precision=PRECISION)
        keep_first(base, older, T, SLIDE)
        fused_slide.barrier(SLIDE)
        scores = tl.dot(qw, tl.trans(k), slide(base, 0, older, newer, T, SLIDE), input_precision=PRECISION)
        row_lse = tl.load(lse + i, mask=inside, other=float("inf"))
        weights = tl.exp2((scores + shift[None, :]) * score_scale - row_lse[:, None])
        if MASKED:
            weights = tl.where(visible(i[:, None], j[None, :], M, window, 0, WINDOW, False), weights, 0.0)
        g = load_rows(grad, i, stride_grad, L, D, BD)
        grads = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        used = weights
        if DROPOUT:
            keep = kept(seed, bh, i[:, None], j[None, :], M + L, dropout)
            used = tl.where(keep, weights / (1 - dropout), 0.0)
            grads = tl.where(keep, grads / (1 - dropout), 0.0)
        grad_v = tl.dot(tl.trans(used.to(g.dtype)), g, grad_v, input_precision=PRECISION)
        row_delta = tl.load(delta + i, mask=inside, other=0.0) * scale
        grads = weights * (grads * scale - row_delta[:, None])
        by_key = grads.to(qw.dtype)
        grad_k = tl.dot(tl.trans(by_key), qw, grad_k, input_precision=PRECISION)
        received = tl.dot(tl.trans(by_key), ones, received, input_precision=PRECISION)
        of_q = tl.dot(by_key, k, input_precision=PRECISION)
        by_older, by_newer = both_by_distance(grads, base, T, SLIDE)
        by_older, by_newer = by_older.to(qw.dtype), by_newer.to(qw.dtype)
        of_q = tl.dot(by_older, r_older, of_q, input_precision=PRECISION)
        of_q = tl.dot(by_newer, r_newer, of_q, input_precision=PRECISION)
        add_rows(grad_query, tl.minimum(tl.maximum(i, 0), L - 1), of_q, inside, D, BD, SLIDE)
        of_r = tl.dot(tl.trans(by_newer), qw, of_r, input_precision=PRECISION)
        gap = n * T - 1 - tl.arange(0, T)
        add_rows(grad_distance, table_row(gap, C), of_r, (gap >= 0) & (gap < M + L), D, BD, SLIDE)
        of_r = tl.dot(tl.trans(by_older), qw, input_precision=PRECISION)
    return grad_k, grad_v, received, of_r


@triton.jit
def table_row(gap, C):
    """The row of a distance in the table. Those that no query and key have get zeros, wherever they are added."""
    return tl.minimum(tl.maximum(C - 1 - gap, 0), C - 1)


@triton.jit(do_not_specialize=LENGTHS)
def keyed_kernel(
    u, w, with_w, key, value, distance, grad, lse, delta, seed_ptr,
    grad_query, grad_key, grad_value, grad_distance, grad_u,
    stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl, stride_dh, stride_dc,
    stride_gb, stride_gh, stride_gl, stride_xb, stride_xh, stride_xl, stride_yb, stride_yh, stride_yl,
    H, L, M, C, window, scale, score_scale, dropout,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values, and its contributions to those of queries and distances."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    j0 = tl.program_id(0) * T
    j = j0 + tl.arange(0, T)
    columns = tl.arange(0, BD)
    row = bh.to(tl.int64) * L
    k = load_rows(key + b * stride_kb + h * stride_kh, j, stride_kl, M + L, D, BD)
    v = load_rows(value + b * stride_vb + h * stride_vh, j, stride_vl, M + L, D, BD)
    with_w += row * D
    grad_query += row * D
    lse += row
    delta += row
    grad += b * stride_gb + h * stride_gh
    distance += h * stride_dh
    grad_distance += h * C * D
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    inside = columns < D
    change = tl.load(u + h * D + columns, mask=inside, other=0.0).to(tl.float32)
    change -= tl.load(w + h * D + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.sum(k.to(tl.float32) * change[None, :], 1)
    base = rolling_buffer(T, SLIDE)
    near = tl.maximum(M - j0, 0) // T
    far = (L - 1 + M - j0) // T
    complete = far
    if WINDOW:
        far = tl.minimum(far, (window - 2 + T) // T)
        complete = tl.minimum(far, tl.maximum(window - T, 0) // T)
    grad_k = tl.zeros([T, BD], tl.float32)
    grad_v = tl.zeros([T, BD], tl.float32)
    of_r = tl.zeros([T, BD], tl.float32)
    received = tl.zeros([T, 16], tl.float32)
    ones = tl.broadcast_to((tl.arange(0, T)[:, None] + near >= 0).to(k.dtype), [T, 16])
    # The diagonal tile, then tiles that every query sees, then tiles that only some see.
    grad_k, grad_v, received, of_r = keyed_span(
        grad_k, grad_v, received, of_r, near, tl.minimum(far, 0), k, v, ones, base,
        shift, with_w, grad, distance, lse, delta, seed, grad_query, grad_distance,
        stride_gl, stride_dc, bh, j0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, True, WINDOW, DROPOUT, SLIDE, PRECISION,
    )  # fmt: skip
    near = tl.maximum(near, 1)
    grad_k, grad_v, received, of_r = keyed_span(
        grad_k, grad_v, received, of_r, near, complete, k, v, ones, base,
        shift, with_w, grad, distance, lse, delta, seed, grad_query, grad_distance,
        stride_gl, stride_dc, bh, j0, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, False, WINDOW, DROPOUT, SLIDE, PRECISION,
    )  # fmt: skip
    if WINDOW:
        grad_k, grad_v, received, of_r = keyed_span(
            grad_k, grad_v, received, of_r, tl.maximum(near, complete + 1), far, k, v, ones, base,
            shift, with_w, grad, distance, lse, delta, seed, grad_query, grad_distance,
            stride_gl, stride_dc, bh, j0, M, L, C, window, scale, score_scale, dropout,
            D, BD, T, True, WINDOW, DROPOUT, SLIDE, PRECISION,
        )  # fmt: skip
    gap = (far + 1) * T - 1 - tl.arange(0, T)
    add_rows(grad_distance, table_row(gap, C), of_r, (gap >= 0) & (gap < M + L), D, BD, SLIDE)

    here = (j < M + L)[:, None] & (columns < D)[None, :]
    grad_key += b * stride_xb + h * stride_xh
    grad_value += b * stride_yb + h * stride_yh
    element = grad_key.dtype.element_ty
    received = tl.sum(received, 1)[:, None] / 16
    grad_k += received * change[None, :]
    tl.store(grad_key + j[:, None] * stride_xl + columns[None, :], grad_k.to(element), mask=here)
    tl.store(grad_value + j[:, None] * stride_yl + columns[None, :], grad_v.to(element), mask=here)
    # The gradient of u is the sum of the keys, each weighted by the sum of its score gradients.
    share = tl.sum(received * k.to(tl.float32), 0)
    tl.store(grad_u + (bh * tl.num_programs(0) + tl.program_id(0)) * D + columns, share, mask=columns < D)


@triton.jit(do_not_specialize=["L"])
def convert_kernel(
    sums, grad_query, grad_biases, stride_qb, stride_qh, stride_ql, H, L,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of queries in their dtype and layout, and their sum."""
    bh = tl.program_id(1)
    i = tl.program_id(0) * T + tl.arange(0, T)
    columns = tl.arange(0, BD)
    here = (i < L)[:, None] & (columns < D)[None, :]
    total = tl.load(sums + (bh.to(tl.int64) * L + i)[:, None] * D + columns[None, :], mask=here, other=0.0)
    grad_query += (bh // H).to(tl.int64) * stride_qb + bh % H * stride_qh
    to = grad_query + i[:, None] * stride_ql + columns[None, :]
    tl.store(to, total.to(grad_query.dtype.element_ty), mask=here)
    share = (bh * tl.num_programs(0) + tl.program_id(0)) * D + columns
    tl.store(grad_biases + share, tl.sum(total, 0), mask=columns < D)
