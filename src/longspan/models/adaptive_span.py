"""Adaptive attention span (Sukhbaatar et al. 2019): every head learns its span. docs/adaptive_span.md

    m_z(x) = clamp((R + z - x) / R, 0, 1)                                   z learned per head, at most S
    a_ij = m_z(i - j) exp(s_ij) / sum_q m_z(i - q) exp(s_iq)                s as in Transformer-XL
    training loss = mean loss + penalty * sum over layers of the mean z

A layer caches and computes only the span of its widest head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.contract import State
from longspan.hints import Hints
from longspan.nn.memory_transformer import MemoryTransformer
from longspan.nn.model_config import require
from longspan.nn.positions import PositionKeys, distance_sinusoid, reusable_tables
from longspan.nn.span import AdaptiveSpan, SpanAttention
from longspan.nn.transformer import TransformerConfig, TransformerLayer, initialise
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor

BLOCK = 64
"""In training a layer caches a multiple of this, because spans change at every step and shapes should not."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig(TransformerConfig):
    span: int = 1024
    """S, the largest span."""
    ramp: int = 32
    """R, the width of the soft edge of the mask."""
    span_penalty: float = 5e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("span", "ramp"):
            require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        require(self.span_penalty >= 0, f"model.span_penalty={self.span_penalty} must not be negative")

    def make_attention(self) -> SpanAttention:
        span = AdaptiveSpan(self.heads, self.span, self.ramp)
        drops = (self.dropout, self.attention_dropout)
        return SpanAttention(self.width, self.heads, self.head_size, *drops, span, qk_norm=self.qk_norm)


class AdaptiveSpanLayer(TransformerLayer):
    def __init__(self, config: AdaptiveSpanConfig) -> None:
        super().__init__(config)
        self.distances = PositionKeys(config.width, config.heads, config.head_size)


class AdaptiveSpanTransformer(MemoryTransformer):
    Config: ClassVar[type] = AdaptiveSpanConfig
    settings = frozenset({"segment", "temperature"})

    def __init__(self, config: AdaptiveSpanConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(AdaptiveSpanLayer(config) for _ in range(config.layers))
        self.u, self.w = (nn.Parameter(torch.empty(config.heads, config.head_size)) for _ in range(2))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.input_dropout = self.output_dropout = nn.Dropout(config.dropout)
        initialise(self)
        for layer in self.layers:
            nn.init.zeros_(layer.attention.adaptive.share)

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        # The size of a cache depends on the learned spans, which needs a sync. The model reads the spans of all layers.
        return Hints(shard_layers=False)

    def spans(self) -> Float[Tensor, "N H"]:
        """z of every layer and head."""
        return torch.stack([layer.attention.adaptive.spans() for layer in self.layers])

    @torch.no_grad()
    def distances_seen(self) -> list[int]:
        """The number of distances that the widest head of each layer sees, distance 0 included."""
        if self.u.is_meta:  # an outline has no spans; use the largest
            return [self.config.span] * self.config.layers
        widest = self.spans().amax(dim=1).tolist()
        return [min(self.config.span, math.ceil(z + self.config.ramp)) for z in widest]

    def limits(self, reading: Reading) -> list[int]:  # noqa: ARG002 (the spans decide it)
        block = BLOCK if self.training else 1
        return [min(-(-(seen - 1) // block) * block, self.config.span - 1) for seen in self.distances_seen()]

    def has_memory(self, reading: Reading | None = None) -> bool:  # noqa: ARG002
        return self.config.span > 1

    def reach(self, reading: Reading | None = None) -> int:  # noqa: ARG002
        """One hop per layer, over the span of its widest head."""
        return sum(seen - 1 for seen in self.distances_seen())

    def facts(self) -> dict[str, Any]:
        spans = self.spans().detach()
        return {
            "span_mean_by_layer": [round(z, 1) for z in spans.mean(dim=1).tolist()],
            "span_max_by_layer": [round(z, 1) for z in spans.amax(dim=1).tolist()],
        }

    def positions(self, state: State, mask: SegmentMask) -> tuple[Sequence[Any], tuple[Tensor, ...]]:
        def R(count: int) -> Float[Tensor, "C E"]:
            return self.input_dropout(distance_sinusoid(count, self.config.width, self.embedding.tables[0]))

        visible, limits = self.distances_seen(), self.limits(state.reading)
        cached = [min(cache.positions, limit) for cache, limit in zip(state.caches, limits, strict=True)]
        counts = [min(far, n + mask.tokens) for far, n in zip(visible, cached, strict=True)]
        keys, shared = reusable_tables([layer.distances for layer in self.layers], counts, state, R)
        return [(r, self.u, self.w) for r in keys], shared

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Tensor = 0.0,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean loss; in training mode plus the penalty on spans."""
        loss, state = super().training_loss(tokens, targets, state, progress, starts)
        if self.training:
            loss = loss + (self.config.span_penalty * self.spans().mean(dim=1).sum()).to(loss.dtype)
        return loss, state
