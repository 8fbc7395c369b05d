"""The shift between scores by distance and scores by key, with the mask: one program per query, for all heads.

A query has one position and one mask for all heads, so both are read once. Nothing is computed but one sum; the time
is that of reading and writing the scores.
"""

import torch
import triton
import triton.language as tl

from longspan.shapes import Tensor


@triton.jit
def by_key_kernel(
    scores, at, visible, other, more, bias, hidden, B, L, C, K,
    stride_ab, stride_al, stride_vb, stride_vl, stride_ob, stride_ol, stride_b, stride_h, stride_l,
    H: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b = row // L
    i = row % L
    begin = K - tl.load(at + b * stride_ab + i * stride_al).to(tl.int32)
    for j0 in tl.range(0, K, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        here = j < K
        seen = tl.load(visible + b.to(tl.int64) * stride_vb + i * stride_vl + j, mask=here, other=0)
        if OTHER:
            apart = tl.load(other + b.to(tl.int64) * stride_ob + i * stride_ol + j, mask=here, other=0)
        for h in tl.static_range(H):
            line = (h * B + b).to(tl.int64) * L + i
            # `here` also keeps the columns inside the row: begin + j < begin + K <= C.
            found = tl.load(scores + line * C + begin + j, mask=here & (seen != 0), other=0.0)
            if OTHER:
                extra = tl.load(more + (b.to(tl.int64) * H + h) * L + i)
                found = tl.where(apart != 0, found + extra, found)
            found = tl.where(seen != 0, found, hidden)
            to = bias + b.to(tl.int64) * stride_b + h * stride_h + i * stride_l + j
            tl.store(to, found.to(bias.dtype.element_ty), mask=here)


@triton.jit
def by_distance_kernel(
    grad, at, visible, other, scores, more, B, L, C, K,
    stride_ab, stride_al, stride_vb, stride_vl, stride_ob, stride_ol, stride_b, stride_h, stride_l,
    H: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b = row // L
    i = row % L
    begin = K - tl.load(at + b * stride_ab + i * stride_al).to(tl.int32)
    for h in tl.static_range(H):
        total = tl.zeros([BLOCK], SUM)
        line = (h * B + b).to(tl.int64) * L + i
        for c0 in tl.range(0, C, BLOCK):
            c = c0 + tl.arange(0, BLOCK)
            j = c - begin
            here = (j >= 0) & (j < K)
            seen = tl.load(visible + b.to(tl.int64) * stride_vb + i * stride_vl + j, mask=here, other=0)
            of = grad + b.to(tl.int64) * stride_b + h * stride_h + i * stride_l + j
            found = tl.load(of, mask=here & (seen != 0), other=0.0)
            tl.store(scores + line * C + c, found, mask=c < C)
            if OTHER:
                apart = tl.load(other + b.to(tl.int64) * stride_ob + i * stride_ol + j, mask=here, other=0)
                total += tl.where(apart != 0, found.to(SUM), 0.0)
        if OTHER:
            tl.store(more + (b.to(tl.int64) * H + h) * L + i, tl.sum(total, 0).to(more.dtype.element_ty))


def launch_by_key(
    scores: Tensor, at: Tensor, visible: Tensor, other: Tensor | None, more: Tensor | None, bias: Tensor, hidden: float
) -> None:
    H, B, L, C = scores.shape
    scores, more = scores.contiguous(), None if more is None else more.contiguous()
    visible, other = keys_last(visible), None if other is None else keys_last(other)
    by_key_kernel[(B * L,)](
        scores, at, visible, other, more, bias, hidden, B, L, C, bias.shape[3],
        *at.stride(), *visible.stride()[:2], *(other if other is not None else visible).stride()[:2],
        *bias.stride()[:3], H=H, OTHER=other is not None, BLOCK=block(bias.shape[3]), num_warps=4,
    )  # fmt: skip


def launch_by_distance(
    grad: Tensor, at: Tensor, visible: Tensor, other: Tensor | None, scores: Tensor, more: Tensor
) -> None:
    H, B, L, C = scores.shape
    grad = keys_last(grad)
    visible, other = keys_last(visible), None if other is None else keys_last(other)
    by_distance_kernel[(B * L,)](
        grad, at, visible, other, scores, more, B, L, C, grad.shape[3],
        *at.stride(), *visible.stride()[:2], *(other if other is not None else visible).stride()[:2],
        *grad.stride()[:3], H=H, OTHER=other is not None, BLOCK=block(C),
        SUM=tl.float64 if grad.dtype == torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip


def keys_last(tensor: Tensor) -> Tensor:
    """The kernels need contiguous rows; the other axes may have any stride, also 0."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def block(length: int) -> int:
    return min(1024, max(128, triton.next_power_of_2(length)))
