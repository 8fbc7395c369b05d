"""A pointer: earlier positions compete with the vocabulary for the next token.

A token that followed a similar state before may follow again: the continuous cache of Grave et al. 2017, trained with
the model like the pointer sentinel of Merity et al. 2017. With the softmax p over the vocabulary and the token x_{i+1}
that followed position i,

    p'(y) = (p(y) exp s_0 + sum_{i: x_{i+1} = y} exp s_i) / (exp s_0 + sum_i exp s_i)

    s_i = q . (Wk h_i) + a_i    s_0 = q . v + b    q = Wq h / sqrt(d)

a_i is a learned bias, one per power of two of the distance.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache.pointer import Candidates
from longspan.nn.precision import wide
from longspan.shapes import Float, Int, Tensor

_INITIAL_BIAS = 10.0
"""Added to b, so that a new model hardly uses the pointer."""
_BUCKETS = 21
"""Distances below 2, 4, ..., 2^20, and above."""
_NEVER = -1e30
"""A score that does not change a sum of exponentials."""


class Pointer(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, size, bias=False)
        self.key = nn.Linear(width, size, bias=False)
        self.none = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.zeros(1))
        self.age_bias = nn.Parameter(torch.zeros(_BUCKETS))

    def scores(self, output: Float[Tensor, "B S D"], candidates: Candidates) -> Float[Tensor, "B S K"]:
        """s_i - s_0, in float32 or wider."""
        query, key = self.query(output) / math.sqrt(len(self.none)), self.key(candidates.hidden)
        scores = query @ torch.cat([key, self.none.expand(len(key), 1, -1)], dim=1).transpose(1, 2)
        scores = scores.to(wide(scores.dtype))
        powers = 2 ** torch.arange(1, _BUCKETS, device=candidates.distance.device)
        bucket = (candidates.distance[..., None] >= powers).sum(-1)
        biases = self.age_bias[bucket] - self.bias - _INITIAL_BIAS
        return (scores[..., :-1] - scores[..., -1:] + biases).masked_fill(~candidates.visible, _NEVER)

    def losses(
        self,
        losses: Float[Tensor, "B S"],
        output: Float[Tensor, "B S D"],
        candidates: Candidates,
        targets: Int[Tensor, "B S"],
    ) -> Float[Tensor, "B S"]:
        """-log p' of the targets, from the -log p of the head."""
        scores = self.scores(output, candidates)
        other = candidates.following[:, None] != targets[..., None]
        found = scores.masked_fill(other, _NEVER).logsumexp(-1)
        return _total(scores) - torch.logaddexp(-losses, found)

    def logits(
        self, logits: Float[Tensor, "B S V"], output: Float[Tensor, "B S D"], candidates: Candidates
    ) -> Float[Tensor, "B S V"]:
        """log p' of every token, from the logits of the head."""
        scores = self.scores(output, candidates)
        peak = scores.amax(-1, keepdim=True).detach()
        shares, index = (scores - peak).exp(), candidates.following[:, None].expand_as(scores)
        found = torch.zeros_like(logits, dtype=scores.dtype).scatter_add(-1, index, shares)
        least = torch.finfo(found.dtype).tiny  # log 0 has no gradient
        found = found.clamp(min=least).log() + peak
        return torch.logaddexp(logits.to(scores.dtype).log_softmax(-1), found) - _total(scores)[..., None]


def _total(scores: Float[Tensor, "B S K"]) -> Float[Tensor, "B S"]:
    """log(1 + sum_i exp(s_i - s_0))."""
    return F.softplus(scores.logsumexp(-1))
