"""Tokens copied from what was read: earlier positions compete with the vocabulary for the next token.

Where a text came to a state like this one before, the token that followed may follow again: the continuous cache of
Grave et al. 2017, learned with the rest of the model as the pointer of Merity et al. 2017 is. x_{i+1} being the token
that followed position i and p the softmax,

    p'(y) = (p(y) exp s_0 + sum_{i: x_{i+1} = y} exp s_i) / (exp s_0 + sum_i exp s_i)

    s_i = q . (Wk h_i) + a_i    s_0 = q . v + b    q = Wq h / sqrt(d)

a_i is one number for all distances from a power of two up to the next.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from longspan.layers.recurrent import wide
from longspan.shapes import Bool, Float, Int, Tensor

_FRESH = 10.0
"""What b is at first, added to its parameter: a fresh model copies next to nothing."""
_AGES = 21
"""Of distances below 2, 4, ..., 2^20, and above."""
_NEVER = -1e30
"""A score that no sum notices."""


class Copying(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, size, bias=False)
        self.key = nn.Linear(width, size, bias=False)
        self.none = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.zeros(1))
        self.age_bias = nn.Parameter(torch.zeros(_AGES))

    def forward(
        self,
        output: Float[Tensor, "B S D"],
        hidden: Float[Tensor, "B K D"],
        age: Int[Tensor, "S K"],
        seen: Bool[Tensor, "B S K"],
    ) -> Float[Tensor, "B S K"]:
        """s_i - s_0, in float32 or wider."""
        query, key = self.query(output) / math.sqrt(len(self.none)), self.key(hidden)
        scores = query @ torch.cat([key, self.none.expand(len(key), 1, -1)], dim=1).transpose(1, 2)
        scores = scores.to(wide(scores.dtype))
        powers = 2 ** torch.arange(1, _AGES, device=age.device)
        ages = self.age_bias[(age[..., None] >= powers).sum(-1)] - self.bias - _FRESH
        return (scores[..., :-1] - scores[..., -1:] + ages).masked_fill(~seen, _NEVER)

    @staticmethod
    def losses(
        losses: Float[Tensor, "B S"],
        scores: Float[Tensor, "B S K"],
        following: Int[Tensor, "B K"],
        targets: Int[Tensor, "B S"],
    ) -> Float[Tensor, "B S"]:
        """-log p' of the targets, from the -log p that the head gives them."""
        found = scores.masked_fill(following[:, None] != targets[..., None], _NEVER).logsumexp(-1)
        return _total(scores) - torch.logaddexp(-losses, found)

    @staticmethod
    def logits(
        logits: Float[Tensor, "B S V"], scores: Float[Tensor, "B S K"], following: Int[Tensor, "B K"]
    ) -> Float[Tensor, "B S V"]:
        """log p' of every token, from the head's scores."""
        peak = scores.amax(-1, keepdim=True).detach()
        shares, index = (scores - peak).exp(), following[:, None].expand_as(scores)
        found = torch.zeros_like(logits, dtype=scores.dtype).scatter_add(-1, index, shares)
        least = torch.finfo(found.dtype).tiny  # the logarithm of nothing has no gradient
        found = found.clamp(min=least).log() + peak
        return torch.logaddexp(logits.to(scores.dtype).log_softmax(-1), found) - _total(scores)[..., None]


def _total(scores: Float[Tensor, "B S K"]) -> Float[Tensor, "B S"]:
    """log(1 + sum_i exp(s_i - s_0))."""
    return F.softplus(scores.logsumexp(-1))
