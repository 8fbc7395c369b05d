"""Attention whose heads learn how far they look (Sukhbaatar et al. 2019)."""

from typing import Any

import torch
from torch import nn

from longspan.kernels.span_attention import span_attention
from longspan.layers.attention import Attention, Position, merge_heads
from longspan.shapes import Float, Int, Tensor


class AdaptiveSpan(nn.Module):
    """m_z(x) = clamp((R + z - x) / R, 0, 1) at distance x, with z = S clamp(share, 0, 1) learned per head.

    The authors clamp `share` itself after every update; here it is left where the optimiser put it, and a gradient that
    would push it further out is dropped (`_Within`).
    """

    def __init__(self, heads: int, span: int, ramp: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(heads))
        self.span, self.ramp = span, ramp

    def spans(self) -> Float[Tensor, "H"]:
        """z of every head; in float64, since a narrower number does not tell far distances apart."""
        return _Within.apply(self.share).double() * self.span

    def log_mask(self, count: int) -> Float[Tensor, "H C"]:
        """log m of the distances count-1, ..., 0."""
        distance = torch.arange(count - 1, -1, -1, device=self.share.device)
        mask = ((self.ramp + self.spans()[:, None] - distance) / self.ramp).clamp(0, 1)
        seen = mask > 0
        # log 0 has no gradient worth having: it is put in place where no gradient flows.
        return torch.where(seen, mask.where(seen, 1.0).log(), float("-inf"))


class _Within(torch.autograd.Function):
    """clamp(x, 0, 1), with the gradient of x wherever a step along it does not lead further out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        outwards = ((x <= 0) & (gradient > 0)) | ((x >= 1) & (gradient < 0))
        return gradient.masked_fill(outwards, 0.0)


class SpanAttention(Attention):
    """Multi-head attention, every head through the mask of its own span."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        dropout: float,
        attention_dropout: float,
        adaptive: AdaptiveSpan,
        *,
        qk_norm: bool = False,
    ) -> None:
        super().__init__(width, heads, head_width, dropout, attention_dropout, qk_norm=qk_norm)
        self.adaptive = adaptive

    def attend(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H K D"],
        value: Float[Tensor, "B H K D"],
        position: Position | None,
        window: int | None = None,  # noqa: ARG002 (the mask is the window)
        first_key: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L E"]:
        assert position is not None
        distance, u, w = (t.to(query.dtype) for t in position)
        log_mask = self.adaptive.log_mask(distance.shape[1]).to(query.dtype)
        dropout = self.attention_dropout if self.training else 0.0
        read = span_attention(query, key, value, distance, u, w, log_mask, first_key=first_key, dropout=dropout)
        return self.dropout(self.output(merge_heads(read)))
