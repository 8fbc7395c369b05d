"""Attention with a learned span per head (Sukhbaatar et al. 2019)."""

from typing import Any

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.kernels.span_attention import span_attention
from longspan.nn.attention import Attention, RelativePosition
from longspan.nn.whole_batch import division, sum_over_batch
from longspan.shapes import Float, Tensor


class AdaptiveSpan(nn.Module):
    """m_z(x) = clamp((R + z - x) / R, 0, 1) at distance x, with z = S clamp(share, 0, 1) learned per head.

    Deviation: the authors clamp `share` after every update. Here it is not changed, and gradients that would push it
    further outside [0, 1] are dropped (`_Clamp`).
    """

    def __init__(self, heads: int, span: int, ramp: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(heads))
        self.span, self.ramp = span, ramp

    def spans(self) -> Float[Tensor, "H"]:
        """z of every head, in float64: narrower types cannot distinguish far distances."""
        return _Clamp.apply(self.share).double() * self.span

    def log_mask(self, count: int) -> Float[Tensor, "H C"]:
        """log m of the distances count-1, ..., 0."""
        distance = torch.arange(count - 1, -1, -1, device=self.share.device)
        mask = ((self.ramp + self.spans()[:, None] - distance) / self.ramp).clamp(0, 1)
        visible = mask > 0
        # The gradient of log 0 is not finite, so -inf is inserted where no gradient flows.
        return torch.where(visible, mask.where(visible, 1.0).log(), float("-inf"))


class _Clamp(torch.autograd.Function):
    """clamp(x, 0, 1) whose gradient is zero only where that of the whole batch would push x further outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.division = division()
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        total = sum_over_batch(gradient, ctx.division)
        outwards = ((x <= 0) & (total > 0)) | ((x >= 1) & (total < 0))
        return gradient.masked_fill(outwards, 0.0)


class SpanAttention(Attention):
    """Multi-head attention with the span mask of every head."""

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
        mask: SegmentMask,
        position: RelativePosition | None = None,
    ) -> Float[Tensor, "B L E"]:
        assert position is not None
        r, u, w = (t.to(query.dtype) for t in position)
        log_mask = self.adaptive.log_mask(r.shape[1]).to(query.dtype)
        dropout = self.attention_dropout if self.training else 0.0
        return self.project(
            span_attention(query, key, value, r, u, w, log_mask, first_key=mask.first_key, dropout=dropout)
        )
