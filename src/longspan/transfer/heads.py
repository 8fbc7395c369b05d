"""What is added to a language model for a task: pooling over a document, and a classifier."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from longspan.shapes import Bool, Float, Int, Tensor


class Pool(NamedTuple):
    """Statistics of a document's hidden states so far. It is a cache of the state, so a document can be read in any
    pieces. An empty row is all zeros, as in every cache."""

    last: Float[Tensor, "B D"]
    greatest: Float[Tensor, "B D"]
    total: Float[Tensor, "B D"]
    positions_read: Int[Tensor, "B"]

    @property
    def positions(self) -> int:
        return 0

    @classmethod
    def empty(cls, batch: int, width: int, like: Tensor) -> "Pool":
        zeros = like.new_zeros(batch, width)
        return cls(zeros, zeros, zeros, torch.zeros(batch, dtype=torch.int64, device=like.device))

    def add(self, h: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"], first: bool) -> "Pool":
        """The pool after a segment. The valid hidden states come first in every row, and padding follows. `last` is
        the newest hidden state or, with `first`, the oldest."""
        h, mask, count = h.to(self.total.dtype), valid[..., None], valid.sum(1)
        has_new, has_old = (count > 0)[:, None], (self.positions_read > 0)[:, None]
        if first:
            last = torch.where(has_new & ~has_old, h[:, 0], self.last)
        else:
            end = count.sub(1).clamp(min=0)[:, None, None].expand(-1, 1, h.shape[-1])
            last = torch.where(has_new, h.gather(1, end)[:, 0], self.last)
        peak = h.masked_fill(~mask, -torch.inf).amax(1)
        peak = torch.where(has_old, torch.maximum(self.greatest, peak), peak)
        greatest = torch.where(has_new, peak, self.greatest)
        return Pool(last, greatest, self.total + torch.where(mask, h, 0.0).sum(1), self.positions_read + count)

    def vector(self, pooling: str) -> Float[Tensor, "B E"]:
        """`last`, `mean`, or [last; max; mean] for `concat` (Howard & Ruder 2018, section 3.3)."""
        mean = self.total / self.positions_read.clamp(min=1)[:, None]
        if pooling == "concat":
            return torch.cat([self.last, self.greatest, mean], dim=-1)
        return mean if pooling == "mean" else self.last


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that uses its running statistics for a batch of one, which has no variance."""

    def forward(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 D"]:
        x = x[:, 0].to(self.weight.dtype)
        if self.training and len(x) == 1:
            x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        else:
            x = super().forward(x)
        return x[:, None]


class Classifier(nn.Sequential):
    """drop, linear. With a hidden layer, ULMFiT's: norm, drop, linear, ReLU, norm, drop, linear."""

    def __init__(self, inputs: int, outputs: int, hidden: int, dropout: float) -> None:
        if not hidden:
            super().__init__(nn.Dropout(dropout), nn.Linear(inputs, outputs))
        else:
            first = BatchNorm(inputs), nn.Dropout(dropout), nn.Linear(inputs, hidden), nn.ReLU(inplace=True)
            super().__init__(*first, BatchNorm(hidden), nn.Dropout(dropout), nn.Linear(hidden, outputs))
        for module in self:
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of documents, [B, D] to [B, C], or of positions, [B, T, D] to [B, T, C]."""
        # Documents get an axis of positions, because dropout takes a tensor without one for weights that rows share.
        return super().forward(x) if x.dim() == 3 else super().forward(x[:, None])[:, 0]
