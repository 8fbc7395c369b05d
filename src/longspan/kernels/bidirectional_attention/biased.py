"""Relative attention in both directions with torch's fused attention, which adds a bias to the scores of the content.

The bias has the terms of position and segment and the mask, in the dtype of the products, and is written once. Scores
by distance come from one product per head, and `scores_by_key` shifts them: row i of the bias is a part of row i of
the product, beginning at another column in every row. Its gradient is the same shift back, without atomics.
"""

# ruff: noqa: ARG001 (fake implementations of custom operations take all arguments)

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan.kernels.bidirectional_attention.reference import View
from longspan.kernels.triton_works import TRITON_WORKS
from longspan.shapes import Bool, Float, Tensor

HIDDEN = -6e4
"""The bias of a key that a query does not see. Finite, because a query may see none. Small, because torch's backward
kernel subtracts a float32 number of the same size from it, whose rounding must not make the exponential overflow."""
ALIGNED = 16
"""Rows of the bias begin at multiples of this many numbers, or torch would copy it."""
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Those with a gradient of the bias. torch may choose cuDNN otherwise, which has none and reports no error."""


def bidirectional_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    s: Float[Tensor, "H D"],
    segments: Float[Tensor, "2 H D"],
    view: View,
) -> Float[Tensor, "B H L D"]:
    """The function of `reference.bidirectional_attention` without dropout."""
    B, H, L, D = query.shape
    K, scale = key.shape[2], D**-0.5
    # One product per head over all rows: broadcasting r over the batch would copy it B times.
    rows = ((query + w[:, None]) * scale).to(query.dtype).transpose(0, 1).reshape(H, B * L, D)
    by_distance = rows @ distance.to(query.dtype).transpose(1, 2)
    visible, at = view.visible.expand(B, L, K), view.at.expand(B, L)
    other = more = None
    if view.other is not None:
        # The softmax does not change if the term of the same segment is subtracted from all scores of a row.
        other = view.other.expand(B, L, K)
        difference = ((segments[1] - segments[0]) * scale).to(query.dtype)
        more = torch.einsum("bhld,hd->bhl", (query + s[:, None]).to(query.dtype), difference)
    bias = scores_by_key(by_distance.view(H, B, L, -1), at, visible, other, more)
    with_u = (query + u[:, None]).to(query.dtype)
    with sdpa_kernel(BACKENDS) if torch.is_grad_enabled() and bias.requires_grad else nullcontext():
        out = F.scaled_dot_product_attention(with_u, key, value, attn_mask=bias, scale=scale)
    return out * visible.any(-1)[:, None, :, None]


@torch.library.custom_op("longspan::scores_by_key", mutates_args=())
def scores_by_key(
    scores: Tensor, at: Tensor, visible: Tensor, other: Tensor | None, more: Tensor | None
) -> Tensor:  # fmt: skip
    """From scores by distance [H, B, L, C] to a bias by key [B, H, L, K]: column K - at + j for key j, plus `more`
    [B, H, L] where `other`; HIDDEN where not visible."""
    H, (B, L, K) = scores.shape[0], visible.shape
    bias = empty_bias(scores, visible)
    if not (TRITON_WORKS and scores.is_cuda):
        column = K - at[..., None] + torch.arange(K, device=at.device)
        found = scores.transpose(0, 1).gather(-1, column[:, None].expand(B, H, L, K))
        if other is not None and more is not None:
            found = found + torch.where(other[:, None], more[..., None], 0.0)
        return bias.copy_(found.masked_fill_(~visible[:, None], HIDDEN))
    from longspan.kernels.bidirectional_attention.kernels import launch_by_key

    launch_by_key(scores, at, visible, other, more, bias, HIDDEN)
    return bias


@torch.library.custom_op("longspan::scores_by_key_backward", mutates_args=())
def _backward(
    grad: Tensor, at: Tensor, visible: Tensor, other: Tensor | None, columns: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of the scores and of `more`; the latter is empty without it."""
    B, H, L, K = grad.shape
    scores = grad.new_empty(H, B, L, columns)
    more = grad.new_empty((B, H, L) if other is not None else 0)
    if not (TRITON_WORKS and grad.is_cuda):
        grad = grad.masked_fill(~visible[:, None], 0.0)
        key = at[..., None] - K + torch.arange(columns, device=at.device)
        inside = (key >= 0) & (key < K)
        found = grad.gather(-1, key.clamp(0, K - 1)[:, None].expand(B, H, L, columns))
        scores.copy_(found.masked_fill_(~inside[:, None], 0.0).transpose(0, 1))
        if other is not None:
            more.copy_(torch.where(other[:, None], grad, 0.0).sum(-1))
        return scores, more
    from longspan.kernels.bidirectional_attention.kernels import launch_by_distance

    launch_by_distance(grad, at, visible, other, scores, more)
    return scores, more


def empty_bias(scores: Float[Tensor, "H B L C"], visible: Bool[Tensor, "B L K"]) -> Float[Tensor, "B H L K"]:
    H, (B, L, K) = scores.shape[0], visible.shape
    return scores.new_empty(B, H, L, -(-K // ALIGNED) * ALIGNED)[..., :K]


@scores_by_key.register_fake
def _(scores, at, visible, other, more):  # type: ignore[no-untyped-def]
    return empty_bias(scores, visible)


@_backward.register_fake
def _(grad, at, visible, other, columns):  # type: ignore[no-untyped-def]
    B, H, L, _ = grad.shape
    return grad.new_empty(H, B, L, columns), grad.new_empty((B, H, L) if other is not None else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, at, visible, other, _ = inputs
    ctx.columns = scores.shape[3]
    ctx.save_for_backward(at, visible, other)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    at, visible, other = ctx.saved_tensors
    scores, more = _backward(grad, at, visible, other, ctx.columns)
    return scores, None, None, None, None if other is None else more


scores_by_key.register_autograd(_differentiate, setup_context=_save)
