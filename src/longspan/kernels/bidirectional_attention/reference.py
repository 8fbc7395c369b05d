"""The definition of relative attention in both directions. It is slow: all scores are in memory several times."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from longspan.shapes import Bool, Float, Int, Tensor


class View(NamedTuple):
    """What every query sees. The first axis may be 1, for all rows of the batch."""

    visible: Bool[Tensor, "B L K"]
    at: Int[Tensor, "B L"]
    """The position of every query among the keys, 0 to K: the distance to key j is at - j."""
    other: Bool[Tensor, "B L K"] | None = None
    """Keys of another segment (the texts of a pair). None: no segments, because the term is the same for all keys."""

    def rows(self, first: int) -> "View":
        """That of the queries from `first` on."""
        return View(self.visible[:, first:], self.at[:, first:], None if self.other is None else self.other[:, first:])


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
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """softmax_j(((q_i + u) . k_j + (q_i + w) . r_{i-j} + (q_i + s) . e_{same or other}) / sqrt(D)) v_j

    Row c of `distance` is r of distance K - c: from K down to at least 1 - K. A query that sees nothing gets zeros.
    """
    K = key.shape[2]
    content = (query + u[:, None]) @ key.transpose(-1, -2)
    by_distance = (query + w[:, None]) @ distance.transpose(-1, -2)
    column = (K - view.at[..., None] + torch.arange(K, device=key.device))[:, None]
    scores = content + by_distance.gather(-1, column.expand(*query.shape[:3], K))
    if view.other is not None:
        same, other = torch.einsum("bhld,shd->sbhl", query + s[:, None], segments)
        scores = scores + torch.where(view.other[:, None], other[..., None], same[..., None])
    scores = scores * query.shape[-1] ** -0.5
    # Finite scores first, so that no gradient is NaN.
    scores = scores if scores.dtype == torch.float64 else scores.float()
    weights = scores.masked_fill(~view.visible[:, None], -1e30).softmax(-1)
    weights = weights.masked_fill(~view.visible[:, None], 0.0).to(value.dtype)
    return F.dropout(weights, dropout) @ value
