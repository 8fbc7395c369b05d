"""Causal convolutions."""

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache import SegmentMask
from longspan.shapes import Bool, Float, Int, Tensor


class ShortConvolution(nn.Module):
    """h'_t = h_t + sum_{j=1..N} c_j * h_{t-j}: every unit adds its weighted values at the N positions before.

    Depthwise as in Primer (So et al. 2021), before attention as in a Canon layer (Allen-Zhu 2025). docs/longspan_xl.md
    """

    def __init__(self, taps: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, width))  # row j - 1 is c_j

    def forward(
        self, h: Float[Tensor, "B T E"], inputs: Float[Tensor, "B N E"] | None, mask: SegmentMask
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N E"] | None]:
        """The convolved segment, and the last N inputs for the next one.

        `inputs` are the N inputs before this segment, or 0 of them if the reading has no memory. None: a family without
        memory.
        """
        N, T = self.weight.shape[0], h.shape[1]
        cached = 0 if inputs is None else inputs.shape[1]
        before = F.pad(
            h.new_zeros(h.shape[0], 0, h.shape[2]) if inputs is None else inputs.to(h.dtype), (0, 0, N - cached, 0)
        )
        line, visible = torch.cat([before, h], dim=1), self._visible(mask)
        convolved = h
        for j, tap in enumerate(self.weight.to(h.dtype), start=1):
            earlier = line[:, N - j : N - j + T]
            if visible is not None:
                earlier = earlier.masked_fill(~visible[..., j - 1, None], 0.0)
            convolved = convolved + tap * earlier
        if inputs is None or not mask.memory:
            return convolved, inputs
        recent = torch.cat([before[:, T:], h[:, -N:]], dim=1).detach()
        if visible is not None:
            # The next token sees the last one, and those before it that the last one sees.
            same_document = F.pad(visible[:, -1, :-1], (1, 0), value=True).flip(1)
            recent = recent.masked_fill(~same_document[..., None], 0.0)
        return convolved, recent

    def _visible(self, mask: SegmentMask) -> Bool[Tensor, "B T N"] | None:
        """Whether each token sees the one j = 1..N positions before it. Cached inputs of other documents are zero
        already, so only document starts inside the segment need a mask."""
        if mask.starts is None or mask.first_key is None:
            return None
        position = torch.arange(mask.cached, mask.keys, device=mask.first_key.device)
        taps = torch.arange(1, self.weight.shape[0] + 1, device=position.device)
        return (position - mask.first_key)[..., None] >= taps


class CausalSeparableConvolution(nn.Module):
    """y_t = W (sum_k d_k * x_{t-k}) + b, k = 0 .. kernel-1: a filter per unit, then a linear map.

    Positions before the segment or before the document's first token count as zeros.
    """

    def __init__(self, width: int, out: int, kernel: int) -> None:
        super().__init__()
        self.depthwise = nn.Parameter(torch.empty(kernel, width))  # row k is for the token k positions before
        self.pointwise = nn.Linear(width, out)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initial filters, which preserve the variance of their input."""
        if self.depthwise.is_meta:
            return  # there is nothing to draw, and torch would import its compiler for it
        kernel, width = self.depthwise.shape
        self.depthwise.copy_(torch.randn(kernel, width, device=self.depthwise.device)).mul_(kernel**-0.5)

    def forward(self, x: Float[Tensor, "B T D"], first_key: Int[Tensor, "B T"] | None = None) -> Float[Tensor, "B T E"]:
        """`first_key[b, t]` is the oldest position that position t of row b may see."""
        return self.pointwise(self._filter(x) if first_key is None else self._filter_within(x, first_key))

    def _filter(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        kernel, width = self.depthwise.shape
        padded = F.pad(x.transpose(1, 2), (kernel - 1, 0))
        return F.conv1d(padded, self.depthwise.flip(0).t()[:, None].to(x.dtype), groups=width).transpose(1, 2)

    def _filter_within(self, x: Float[Tensor, "B T D"], first_key: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        T = x.shape[1]
        age = (torch.arange(T, device=x.device) - first_key)[..., None]
        total = x * self.depthwise[0].to(x.dtype)
        for k, tap in enumerate(self.depthwise[1:T], start=1):
            before = F.pad(x, (0, 0, k, 0))[:, :T]
            total = total + before.masked_fill(age < k, 0.0) * tap.to(x.dtype)
        return total
