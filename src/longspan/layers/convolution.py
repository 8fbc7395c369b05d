"""Convolutions that look only to the left."""

import torch
from torch import nn
from torch.nn import functional as F

from longspan.shapes import Bool, Float, Int, Tensor


class ShortConvolution(nn.Module):
    """h'_t = h_t + sum_{j=1..N} c_j * h_{t-j}: every unit takes in its own values at the N positions before.

    Depthwise, as in Primer (So et al. 2021), and before attention, as a Canon layer (Allen-Zhu 2025):
    docs/transformer_xl.md#a-short-convolution
    """

    def __init__(self, taps: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, width))  # row j - 1 is c_j

    def forward(
        self,
        h: Float[Tensor, "B T E"],
        before: Float[Tensor, "B N E"] | None = None,
        seen: Bool[Tensor, "B T N"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """`before` are the N inputs before the segment, zeros where there is none; `seen[b, t, j - 1]` says whether
        position t of row b may take in the one j places back, all of them where it is left out."""
        (N, _), T = self.weight.shape, h.shape[1]
        line = F.pad(h, (0, 0, N, 0)) if before is None else torch.cat([before.to(h.dtype), h], dim=1)
        mixed = h
        for j, tap in enumerate(self.weight.to(h.dtype), start=1):
            earlier = line[:, N - j : N - j + T]
            if seen is not None:
                earlier = earlier.masked_fill(~seen[..., j - 1, None], 0.0)
            mixed = mixed + tap * earlier
        return mixed


class CausalSeparableConvolution(nn.Module):
    """y_t = W (sum_k d_k * x_{t-k}) + b, k = 0 .. kernel-1: a filter per unit, then a mix of units.

    What lies before the segment or before the document's first token counts as zeros.
    """

    def __init__(self, width: int, out: int, kernel: int) -> None:
        super().__init__()
        self.depthwise = nn.Parameter(torch.empty(kernel, width))  # row k is for the token k places back
        self.pointwise = nn.Linear(width, out)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Filters that keep the size of what they read."""
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
