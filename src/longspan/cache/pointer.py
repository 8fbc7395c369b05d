"""The cache of a pointer: the last outputs of the model and their input tokens."""

from typing import NamedTuple

import torch

from longspan.cache.attention import expanded_zeros
from longspan.shapes import Bool, Float, Int, Tensor


class PointerCache(NamedTuple):
    hidden: Float[Tensor, "B C D"]
    tokens: Int[Tensor, "B C 1"]
    """Token ids plus one; 0 for an empty slot."""


class Candidates(NamedTuple):
    """What queries may copy: the output at every earlier position and the token that followed it."""

    hidden: Float[Tensor, "B K D"]
    following: Int[Tensor, "B K"]
    distance: Int[Tensor, "S K"]
    visible: Bool[Tensor, "B S K"]
    """The position is before the query, within reach and in the same document."""


class PointerContext(NamedTuple):
    """[cached positions; segment] for the pointer."""

    hidden: Float[Tensor, "B N D"]
    tokens: Int[Tensor, "B N"]
    """Token ids plus one; 0 for an empty slot."""
    first: Int[Tensor, "B T"] | None
    """The first position of each query's document; None if no document starts in the segment."""
    reach: int

    @classmethod
    def of(
        cls,
        cache: PointerCache,
        hidden: Float[Tensor, "B T D"],
        tokens: Int[Tensor, "B T"],
        starts: Bool[Tensor, "B T"] | None,
        reach: int,
    ) -> "PointerContext":
        cached = cache.tokens.shape[1]
        all_hidden = torch.cat([cache.hidden.to(hidden.dtype), hidden], dim=1)
        all_tokens = torch.cat([cache.tokens[..., 0], tokens + 1], dim=1)
        if starts is None:
            return cls(all_hidden, all_tokens, None, reach)
        position = torch.arange(cached, all_tokens.shape[1], device=tokens.device)
        return cls(all_hidden, all_tokens, torch.where(starts, position, 0).cummax(dim=1).values, reach)

    def candidates(self, queries: int) -> Candidates:
        """The candidates of the last `queries` positions."""
        position = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        query, key = position[-queries:, None], position[:-1]
        distance = query - key
        visible = (self.tokens[:, None, :-1] > 0) & (distance > 0) & (distance <= self.reach)
        if self.first is not None:
            visible = visible & (key >= self.first[:, -queries:, None])
        return Candidates(self.hidden[:, :-1], (self.tokens[:, 1:] - 1).clamp(min=0), distance, visible)

    def cache(self) -> PointerCache:
        """The cache after the segment: the last positions, detached, without documents that have ended."""
        hidden, tokens = self.hidden[:, -self.reach :].detach(), self.tokens[:, -self.reach :, None]
        if self.first is None:
            return PointerCache(hidden, tokens)
        position = torch.arange(self.tokens.shape[1], device=tokens.device)[-self.reach :]
        ended = (position < self.first[:, -1:])[..., None]
        return PointerCache(hidden.masked_fill(ended, 0.0), tokens.masked_fill(ended, 0))


def empty_pointer_cache(like: Tensor, batch: int, reach: int, width: int) -> PointerCache:
    """An empty cache of the final size, so that its shape never changes."""
    tokens = expanded_zeros(like, batch, reach, 1, dtype=torch.int64)
    return PointerCache(expanded_zeros(like, batch, reach, width), tokens)
