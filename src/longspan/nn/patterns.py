"""Layers whose heads attend under sparse patterns, and the head of bidirectional models."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from longspan.cache import SegmentMask
from longspan.errors import ConfigError
from longspan.kernels.block_attention import Distances, Pattern, block_attention, oldest_seen
from longspan.nn.adaptive_softmax import AdaptiveSoftmax
from longspan.nn.transformer import TransformerConfig, TransformerLayer
from longspan.shapes import Float, Int, Tensor

NOT_CAUSAL = (
    "this model is bidirectional (model.causal=false), so it cannot predict the next token; "
    "use its hidden_states, longspan finetune or longspan embed, or model.causal=true"
)


class PatternLayer(TransformerLayer):
    """Every head has its own pattern; neighbouring heads with the same pattern are computed together."""

    def __init__(self, config: TransformerConfig, patterns: Sequence[Pattern]) -> None:
        super().__init__(config)
        counts = [(pattern, len(list(same))) for pattern, same in groupby(patterns)]
        self.groups = [
            (slice(begin := sum(n for _, n in counts[:i]), begin + n), pattern) for i, (pattern, n) in enumerate(counts)
        ]

    def attend(
        self,
        inputs: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        mask: SegmentMask,
        position: Sequence[Distances] | None,
    ) -> Float[Tensor, "B T E"]:
        """`position` has the position terms of each group of heads; None for the content term only."""
        query = self.attention.queries(inputs)
        patterns = [pattern for _, pattern in self.groups]
        return self.attention.project(self.by_groups(patterns, query, keys, values, mask.first_key, position))

    def by_groups(
        self,
        patterns: Sequence[Pattern],
        query: Float[Tensor, "B H T D"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        first_key: Int[Tensor, "B T"] | None,
        positions: Sequence[Distances] | None,
    ) -> Float[Tensor, "B H T D"]:
        """The attention of every group of heads under its pattern."""
        dropout = self.attention.attention_dropout if self.training else 0.0
        outputs = []
        for i, ((heads, _), pattern) in enumerate(zip(self.groups, patterns, strict=True)):
            position = None if positions is None else positions[i]
            q, k, v = (query, keys, values) if len(self.groups) == 1 else (t[:, heads] for t in (query, keys, values))
            outputs.append(block_attention(q, k, v, pattern, first_key=first_key, position=position, dropout=dropout))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]

    def oldest(self, oldest: Int[Tensor, "L"]) -> Int[Tensor, "L"]:
        """The minimum of `oldest` over the keys that any head of a query sees."""
        found = [oldest_seen(pattern, heads.stop - heads.start, oldest) for heads, pattern in self.groups]
        return torch.stack(found).amin(0)


def farthest(layers: Iterable[Any], tokens: int) -> int:
    """How far back a token can influence a prediction within one segment: one hop per layer under its pattern."""
    position = torch.arange(tokens, device="cpu")
    oldest = position
    for layer in layers:
        oldest = layer.oldest(oldest)
    return int((position - oldest).max())


class CausalOption:
    """A family that is a language model with `model.causal = true`, and a bidirectional encoder without."""

    config: Any

    @property
    def causal(self) -> bool:
        return self.config.causal

    @property
    def predicts_next(self) -> bool:
        return self.config.causal

    def require_next_token(self) -> None:
        if not self.causal:
            raise ConfigError(NOT_CAUSAL)


class EncoderHead(AdaptiveSoftmax):
    """The head of a bidirectional model (`causal = false`). The model has already seen the next token, so the head has
    weights but refuses to predict."""

    def logits(self, hidden: Float[Tensor, "B T D"], temperature: float = 1.0) -> Float[Tensor, "B T V"]:  # noqa: ARG002
        raise ConfigError(NOT_CAUSAL)

    def losses(
        self,
        hidden: Float[Tensor, "B T D"],  # noqa: ARG002
        targets: Int[Tensor, "B T"],  # noqa: ARG002
        temperature: float = 1.0,  # noqa: ARG002
    ) -> Float[Tensor, "B T"]:
        raise ConfigError(NOT_CAUSAL)


def head_type(causal: bool) -> type[AdaptiveSoftmax]:
    return AdaptiveSoftmax if causal else EncoderHead
