"""Kinds of dropout that torch does not have: masks by a hash, one mask for all positions, and dropout of words."""

import torch
from torch import nn
from torch.nn import functional as F

from longspan.shapes import Bool, Float, Int, Tensor


class HashedDropout(nn.Dropout):
    """Dropout whose mask is a hash of a seed and the position of a number, in compiled code.

    Compiled dropout of torch computes ten rounds of Philox per number, which takes longer than reading and writing it,
    and keeps the mask for the backward pass. A hash of a few operations is computed again there.
    """

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if not (self.training and self.p and torch.compiler.is_compiling() and x.numel() < 2**31):
            return super().forward(x)
        # The product of random numbers below 1 and 2^31 has 24 random bits.
        seeds = (torch.rand(2, device=x.device, dtype=torch.float32) * 2**31).to(torch.int32)
        return torch.where(hashed_mask(seeds, x.shape, self.p), x / (1 - self.p), 0.0)


def hashed_mask(seeds: Int[Tensor, "2"], shape: torch.Size, rate: float) -> Bool[Tensor, "..."]:
    """True with probability 1 - rate: lowbias32 (Wellons 2018) of the position, with a second seed between its
    rounds."""
    h = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device).view(shape) ^ seeds[0]
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D + seeds[1]
    h = (h ^ ((h >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    h = h ^ ((h >> 16) & 0xFFFF)
    return (h & 0x7FFFFFFF) >= round(rate * 2**31)


class LockedDropout(nn.Module):
    """One mask per row for all positions of a call (variational dropout, Gal & Ghahramani 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Float[Tensor, "... T D"]) -> Float[Tensor, "... T D"]:
        if not self.training or self.rate == 0.0:
            return x
        return x * F.dropout(x.new_ones(*x.shape[:-2], 1, x.shape[-1]), self.rate)


class WordDropout(nn.Module):
    """Drops rows of the embedding table, so a word at all its positions in a call (Gal & Ghahramani 2016).

    The factor of each row multiplies the embedded vectors instead of the table. This gives the same numbers, because
    they are linear in the table, and does not change a tied softmax.
    """

    def __init__(self, vocabulary: int, rate: float) -> None:
        super().__init__()
        self.vocabulary, self.rate = vocabulary, rate

    def forward(self, embedded: Float[Tensor, "B T D"], tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        if not self.training or self.rate == 0.0:
            return embedded
        kept = F.dropout(embedded.new_ones(self.vocabulary), self.rate)[tokens][..., None]
        return self.drop(embedded, kept)

    def drop(self, embedded: Float[Tensor, "B T D"], kept: Float[Tensor, "B T 1"]) -> Float[Tensor, "B T D"]:
        return embedded * kept


class WordBlanking(WordDropout):
    """The same for models with norms: a dropped word becomes (0, 1, 0, 1, ...), the blank of Xie et al. 2017.

    The first token of a document attends only to itself, so a zero vector would stay zero in every layer. Each norm
    multiplies the gradient of a zero vector by 1 / sqrt(eps), which overflows after a few layers.
    """

    def drop(self, embedded: Float[Tensor, "B T D"], kept: Float[Tensor, "B T 1"]) -> Float[Tensor, "B T D"]:
        blank = (torch.arange(embedded.shape[-1], device=embedded.device) % 2).to(embedded.dtype)
        return torch.where(kept == 0, blank, embedded * kept)
