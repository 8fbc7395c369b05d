"""A backward pass of relative attention in one kernel, as a variant of attention_variants.py.

Queries stay, and the gradients of keys and values are added to float32 sums by atomics: 8 products per tile instead of
12, but 48 KB per tile of 64 by 64 are added in the L2 cache instead of 16.
"""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan.kernels.relative_attention import fused_slide
from longspan.kernels.relative_attention.fused import LOG2E, empty_heads, launch, padded
from longspan.kernels.relative_attention.fused_backward import prepare_kernel
from longspan.kernels.relative_attention.fused_forward import (
    LENGTHS,
    kept,
    load_distances,
    load_rows,
    reach,
    visible,
)
from longspan.kernels.relative_attention.fused_slide import (
    GATHER,
    add_rows,
    carry_back,
    keep_block,
    keep_first,
    rolling_buffer,
    slide,
    unslide,
)

fused_slide.WINDOWED.add("joint_kernel")


@dataclass(frozen=True)
class Joint:
    """Launch options, and how many bytes the sums of keys and values take at a time."""

    limit: int = 1 << 40
    stages: int = 2
    bulk: bool = False  # sums by the tensor memory accelerator, from shared memory
    registers: int | None = None

    def backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, distance: Tensor,
        u: Tensor, w: Tensor, seed: Tensor | None, window: int, dropout: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients of query, key, value and distance, and shares of those of u + w and of u."""
        B, H, L, D = query.shape
        K, C, BD = key.shape[2], distance.shape[1], padded(D)
        how = launch("query", query, K, plain=dropout == 0.0)
        T, blocks = how.T, -(-L // how.T)
        with_u, with_w = query.new_empty(2, B, H, L, D).unbind(0)
        delta = torch.empty_like(lse)
        prepare_kernel[(-(-L // 64), B * H)](
            query, u.contiguous(), w.contiguous(), out, grad, with_u, with_w, delta,
            *query.stride()[:3], *out.stride()[:3], *grad.stride()[:3], H, L, D=D, BD=BD, T=64,
        )  # fmt: skip
        grad_query, grad_key, grad_value = empty_heads(query, L), empty_heads(key, K), empty_heads(value, K)
        grad_distance = query.new_zeros(H, C, D, dtype=torch.float32)
        biases = query.new_empty(2, B, H, blocks, D, dtype=torch.float32)
        bulk = self.bulk and D == BD and min(window or K, K) <= C
        rows = B if dropout else max(1, min(B, self.limit // (8 * H * K * D)))  # the dropout mask depends on the row
        sums = query.new_empty(2, rows, K, H, D, dtype=torch.float32)
        for start in range(0, B, rows):
            some = slice(start, start + rows)
            here = sums[:, : min(rows, B - start)].zero_()
            to: Any = (*here, grad_distance)
            if bulk:
                to = (
                    *(table(x.flatten(0, 1).flatten(1), T, BD) for x in here),
                    table(grad_distance.flatten(0, 1), T, BD),
                )
            joint_kernel[(blocks, here.shape[1] * H)](
                with_u[some], with_w[some], key[some], value[some], distance,
                grad[some], lse[some], delta[some], None, seed,
                grad_query[some], *to, biases[0, some], biases[1, some],
                *key.stride()[:3], *value.stride()[:3], *distance.stride()[:2],
                *grad.stride()[:3], *grad_query.stride()[:3],
                H, L, K - L, C, window, D**-0.5, LOG2E * D**-0.5, dropout,
                D=D, BD=BD, T=T, WINDOW=window > 0, FIRST=False, DROPOUT=dropout > 0.0, SLIDE=how.slide,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32", BULK=bulk,
                num_warps=how.num_warps, num_stages=min(self.stages, how.num_stages),
                **({} if self.registers is None else {"maxnreg": self.registers}),
            )  # fmt: skip
            for result, total in zip((grad_key, grad_value), here, strict=True):
                result[some].transpose(1, 2).copy_(total)
        return grad_query, grad_key, grad_value, grad_distance, *biases


def table(tensor: Tensor, T: int, BD: int) -> Any:
    """A descriptor for blocks of T rows and BD columns."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [T, BD])


@triton.jit
def joint_span(
    by_key, by_distance_sum, older, before, r_older, done, far, near, qu, qw, g, lse, delta, base,
    key, value, distance, grad_key, grad_value, grad_distance, first, seed,
    stride_key, stride_value, stride_distance, bh, i0, H, M, L, C, window, scale, score_scale, dropout,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Tiles far, far-1, ..., near of one block of queries. The gradient of a distance is complete after two tiles."""
    K = M + L
    b, h = bh // H, bh % H
    row0, column0 = b * K, h * D
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
            used = tl.where(keep, weights / (1 - dropout), 0.0)
        here, place = (j >= 0) & (j < K), tl.minimum(tl.maximum(j, 0), K - 1)
        of_v = tl.dot(tl.trans(used.to(k.dtype)), g, input_precision=PRECISION)
        if BULK:
            grad_value.atomic_add([row0 + M + i0 - n * T, column0], of_v)
        else:
            add_rows(grad_value, place * H, of_v, here, D, BD, SLIDE)
        grads = weights * (grads * scale - delta[:, None])
        by_key = tl.dot(grads.to(k.dtype), k, by_key, input_precision=PRECISION)
        of_k = tl.dot(tl.trans(grads.to(k.dtype)), qu, input_precision=PRECISION)
        if BULK:
            grad_key.atomic_add([row0 + M + i0 - n * T, column0], of_k)
        else:
            add_rows(grad_key, place * H, of_k, here, D, BD, SLIDE)
        by_distance = unslide(grads, base, done + step, before, T, SLIDE).to(k.dtype)
        if SLIDE == GATHER:
            before = grads
        gap = (n + 1) * T - 1 - tl.arange(0, T)
        by_distance_sum = tl.dot(by_distance, r_older, by_distance_sum, input_precision=PRECISION)
        r_older = r
        of_r = tl.dot(tl.trans(by_distance), qw, input_precision=PRECISION)
        if BULK:
            grad_distance.atomic_add([h * C + C - (n + 1) * T, 0], of_r)
        else:
            add_rows(grad_distance, tl.maximum(C - 1 - gap, 0), of_r, gap < K, D, BD, SLIDE)
        carry_back(base, done + step, grads, T, SLIDE)
    return by_key, by_distance_sum, older, before, r_older


@triton.jit(do_not_specialize=LENGTHS)
def joint_kernel(
    with_u, with_w, key, value, distance, grad, lse, delta, first, seed_ptr,
    grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u,
    stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl, stride_dh, stride_dc,
    stride_gb, stride_gh, stride_gl, stride_qb, stride_qh, stride_ql,
    H, L, M, C, window, scale, score_scale, dropout,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, DROPOUT: tl.constexpr, SLIDE: tl.constexpr, PRECISION: tl.constexpr,
    BULK: tl.constexpr = False,
):  # fmt: skip
    """Gradients of one block of queries, and its contributions to all others."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    i0 = block * T
    columns = tl.arange(0, BD)
    i = i0 + tl.arange(0, T)
    row = bh.to(tl.int64) * L
    qu = load_rows(with_u + row * D, i, D, L, D, BD)
    qw = load_rows(with_w + row * D, i, D, L, D, BD)
    g = load_rows(grad + b * stride_gb + h * stride_gh, i, stride_gl, L, D, BD)
    row_lse = tl.load(lse + row + i, mask=i < L, other=float("inf"))
    row_delta = tl.load(delta + row + i, mask=i < L, other=0.0) * scale
    key += b * stride_kb + h * stride_kh
    value += b * stride_vb + h * stride_vh
    distance += h * stride_dh
    if not BULK:
        grad_key += (b * (M + L) * H + h) * D
        grad_value += (b * (M + L) * H + h) * D
        grad_distance += h * C * D
    if FIRST:
        first += b * L
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    base = rolling_buffer(T, SLIDE)
    farthest, complete = reach(i0, M, L, window, first, T, WINDOW, FIRST, T)
    r = load_distances(distance, (farthest + 1) * T - 1, stride_dc, C, D, BD, T)
    older = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
    # Entries of tile farthest+1 are not gradients, so they are zero.
    met = tl.arange(0, T)[:, None] + tl.arange(0, T)[None, :] >= T - 1
    keep_first(base, tl.where(met, older, 0.0), T, SLIDE)
    before = tl.zeros([T, T], tl.float32)
    by_key = tl.zeros([T, BD], tl.float32)
    by_distance = tl.zeros([T, BD], tl.float32)
    by_key, by_distance, older, before, r = joint_span(
        by_key, by_distance, older, before, r, 0, farthest, complete + 1, qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_key, grad_value, grad_distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, H, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, BULK,
    )  # fmt: skip
    by_key, by_distance, older, before, r = joint_span(
        by_key, by_distance, older, before, r, farthest - complete, complete, 1,
        qu, qw, g, row_lse, row_delta, base, key, value, distance, grad_key, grad_value, grad_distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, H, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, False, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, BULK,
    )  # fmt: skip
    by_key, by_distance, older, before, r = joint_span(
        by_key, by_distance, older, before, r, farthest, 0, 0, qu, qw, g, row_lse, row_delta, base,
        key, value, distance, grad_key, grad_value, grad_distance, first, seed,
        stride_kl, stride_vl, stride_dc, bh, i0, H, M, L, C, window, scale, score_scale, dropout,
        D, BD, T, True, WINDOW, FIRST, DROPOUT, SLIDE, PRECISION, BULK,
    )  # fmt: skip

    grad_query += b * stride_qb + h * stride_qh
    tl.store(
        grad_query + i[:, None] * stride_ql + columns[None, :],
        (by_key + by_distance).to(grad_query.dtype.element_ty),
        mask=(i < L)[:, None] & (columns < D)[None, :],
    )
    share = (bh * tl.num_programs(0) + block) * D + columns
    tl.store(grad_biases + share, tl.sum(by_key + by_distance, 0), mask=columns < D)
    tl.store(grad_u + share, tl.sum(by_key, 0), mask=columns < D)
