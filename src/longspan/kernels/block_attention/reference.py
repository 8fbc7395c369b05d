"""The definition of attention under a pattern: the full matrix with a mask, written for clarity."""

from dataclasses import dataclass

import torch

from longspan.kernels.block_attention.dropout import PairDropout
from longspan.kernels.block_attention.pattern import Pattern
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class Distances:
    """The position terms of Dai et al. 2019: r of the distances far, ..., step, 0, -step, ..., -ahead*step.

    A distance between two of them uses the lower one; one beyond the ends uses the last.
    """

    r: Float[Tensor, "H C D"]
    u: Float[Tensor, "H D"]
    w: Float[Tensor, "H D"]
    ahead: int = 0
    step: int = 1

    def column(self, gap: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The index in r of a distance."""
        far = self.r.shape[1] - 1 - self.ahead
        return far - torch.clamp(gap // self.step, -self.ahead, far)


def block_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    pattern: Pattern,
    *,
    first_key: Int[Tensor, "B L"] | None = None,
    position: Distances | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """softmax_j(q_i . k_j / sqrt(D)) v_j over the keys j that the pattern shows to query i.

    With `position` the score is ((q_i + u) . k_j + (q_i + w) . r_{i-j}) / sqrt(D). Query i is key K - L + i.
    `first_key[b, i]` is the first key of the document of query i, or the oldest valid one in memory. Positions of the
    pattern are counted from it, and earlier keys are not visible. The output of a query without visible keys is zero.
    """
    L, K = query.shape[2], key.shape[2]
    if position is None:
        scores = query @ key.transpose(-1, -2)
    else:
        gap = torch.arange(K - L, K, device=query.device)[:, None] - torch.arange(K, device=query.device)
        r, u, w = (t.to(query.dtype) for t in (position.r, position.u, position.w))
        terms = (query + w[:, None]) @ r.transpose(-1, -2)
        scores = (query + u[:, None]) @ key.transpose(-1, -2)
        scores = scores + terms.gather(-1, position.column(gap).expand(*scores.shape))
    hidden = ~visible(pattern, query.shape[1], L, K, first_key, query.device)
    nothing = hidden.all(-1, keepdim=True)
    scores = (scores / query.shape[-1] ** 0.5).masked_fill(hidden & ~nothing, float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)
    place = torch.arange(K, device=query.device)
    return PairDropout(dropout, query)(weights, place[K - L :, None], place) @ value


def visible(
    pattern: Pattern, heads: int, L: int, K: int, first_key: Int[Tensor, "B L"] | None, device: torch.device
) -> Bool[Tensor, "B H L K"]:
    """The complete visibility matrix."""
    query, key = torch.arange(K - L, K, device=device)[:, None], torch.arange(K, device=device)
    head = torch.arange(heads, device=device)[:, None, None]
    if first_key is None:
        return pattern.seen(head, query, key).expand(1, heads, L, K)
    first = first_key[:, None, :, None]
    shown = pattern.seen(head, query - first, key - first) & (key >= first)
    if not pattern.causal:  # a key of a later document
        shown = shown & (query >= first_key[:, None, None, :])
    return shown.expand(-1, heads, L, K)
