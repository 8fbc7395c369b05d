"""A layer whose heads each see what a pattern shows them."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from longspan.contract import Decoder, LanguageModel, State
from longspan.errors import ConfigError
from longspan.kernels.block_attention import Distances, Pattern, block_attention, oldest_seen
from longspan.layers.attention import merge_heads
from longspan.layers.transformer import TransformerConfig, TransformerLayer
from longspan.shapes import Bool, Float, Int, Tensor


class PatternLayer(TransformerLayer):
    """Attention of each head under its pattern, then feed-forward; neighbouring heads of one pattern go together."""

    def __init__(self, config: TransformerConfig, patterns: Sequence[Pattern]) -> None:
        super().__init__(config)
        counts = [(pattern, len(list(same))) for pattern, same in groupby(patterns)]
        self.groups = [
            (slice(begin := sum(n for _, n in counts[:i]), begin + n), pattern) for i, (pattern, n) in enumerate(counts)
        ]

    def forward(  # type: ignore[override]
        self,
        h: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        first_key: Int[Tensor, "B T"] | None,
        positions: Sequence[Distances] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """`positions` are the position terms of each group of heads; None for content alone."""
        query = self.attention.queries(self.attention_residual.inputs(h))
        read = self.read(h, query, keys, values, first_key, positions)
        h = self.attention_residual(h, self.attention.dropout(self.attention.output(merge_heads(read))))
        return self.feed_forward_residual(h, self.feed_forward(self.feed_forward_residual.inputs(h)))

    def read(
        self,
        h: Float[Tensor, "B T E"],  # noqa: ARG002 (for families that read more than their keys)
        query: Float[Tensor, "B H T D"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        first_key: Int[Tensor, "B T"] | None,
        positions: Sequence[Distances] | None,
    ) -> Float[Tensor, "B H T D"]:
        return self.by_groups([p for _, p in self.groups], query, keys, values, first_key, positions)

    def by_groups(
        self,
        patterns: Sequence[Pattern],
        query: Float[Tensor, "B H T D"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        first_key: Int[Tensor, "B T"] | None,
        positions: Sequence[Distances] | None,
    ) -> Float[Tensor, "B H T D"]:
        """What each group of heads reads under its pattern."""
        dropout = self.attention.attention_dropout if self.training else 0.0
        read = []
        for i, ((heads, _), pattern) in enumerate(zip(self.groups, patterns, strict=True)):
            position = None if positions is None else positions[i]
            q, k, v = (query, keys, values) if len(self.groups) == 1 else (t[:, heads] for t in (query, keys, values))
            read.append(block_attention(q, k, v, pattern, first_key=first_key, position=position, dropout=dropout))
        return torch.cat(read, dim=1) if len(read) > 1 else read[0]

    def oldest(self, oldest: Int[Tensor, "L"]) -> Int[Tensor, "L"]:
        """The least of `oldest` among what any head of a query sees."""
        found = [oldest_seen(pattern, heads.stop - heads.start, oldest) for heads, pattern in self.groups]
        return torch.stack(found).amin(0)


def farthest(layers: Iterable[Any], tokens: int) -> int:
    """How far back a token can be felt within one segment: a hop per layer, each to what the pattern shows."""
    place = torch.arange(tokens, device="cpu")
    oldest = place
    for layer in layers:
        oldest = layer.oldest(oldest)
    return int((place - oldest).max())


def require_causal(causal: bool) -> None:
    """Losses and generation are of the next token."""
    if not causal:
        raise ConfigError(
            "this model reads both ways (model.causal=false), so it has seen the next token and is not scored on it; "
            "use its hidden_states, or model.causal=true"
        )


class TwoSidedOption(LanguageModel):
    """A family whose config may say `causal = false`: it then encodes, and neither scores nor writes."""

    def losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T"], State]:
        require_causal(self.config.causal)
        return super().losses(tokens, targets, state, starts)

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        require_causal(self.config.causal)
        return super().decoder(state, batch)
