"""Adaptive attention span (Sukhbaatar et al. 2019): every head learns how far it looks. docs/adaptive_span.md

    m_z(x) = clamp((R + z - x) / R, 0, 1)                                   z learned per head, at most S
    a_ij = m_z(i - j) exp(s_ij) / sum_q m_z(i - q) exp(s_iq)                s as in Transformer-XL
    training loss = mean loss + penalty * sum over layers of the mean z

A layer remembers and reads only as far as its widest head looks.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from longspan.contract import LanguageModel, State
from longspan.layers.model_config import require
from longspan.layers.relative import RelativeLayer, dropped_sinusoids
from longspan.layers.span import AdaptiveSpan, SpanAttention
from longspan.layers.transformer import TransformerConfig, initialise
from longspan.memory.forms import empty_memory, held, require_memory, with_memory
from longspan.memory.segments import first_visible, remaining
from longspan.shapes import Bool, Float, Int, Tensor

BLOCK = 64
"""In training a memory is cut to whole blocks: spans move with every step, and shapes should not."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig(TransformerConfig):
    span: int = 1024
    ramp: int = 32
    span_penalty: float = 5e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("span", "ramp"):
            require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        require(self.span_penalty >= 0, f"model.span_penalty={self.span_penalty} must not be negative")

    @property
    def capacity(self) -> int:
        """The most positions a row remembers: the farthest distance below the largest span."""
        return self.span - 1


class AdaptiveSpanLayer(RelativeLayer):
    def __init__(self, config: AdaptiveSpanConfig) -> None:
        super().__init__(config)
        self.attention = SpanAttention(
            config.width,
            config.heads,
            config.head_size,
            config.dropout,
            config.attention_dropout,
            AdaptiveSpan(config.heads, config.span, config.ramp),
            qk_norm=config.qk_norm,
        )


class AdaptiveSpanTransformer(LanguageModel):
    Config: ClassVar[type] = AdaptiveSpanConfig

    def __init__(self, config: AdaptiveSpanConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(AdaptiveSpanLayer(config) for _ in range(config.layers))
        self.u = nn.Parameter(torch.empty(config.heads, config.head_size))
        self.w = nn.Parameter(torch.empty(config.heads, config.head_size))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)
        for adaptive in self._adaptive():
            nn.init.zeros_(adaptive.share)

    def _adaptive(self) -> list[AdaptiveSpan]:
        layers: Any = self.layers
        return [layer.attention.adaptive for layer in layers]

    def spans(self) -> Float[Tensor, "N H"]:
        """z of every layer and head."""
        return torch.stack([adaptive.spans() for adaptive in self._adaptive()])

    @torch.no_grad()
    def distances_seen(self) -> list[int]:
        """How many distances the widest head of each layer sees, its own position included."""
        widest = self.spans().amax(dim=1).tolist()
        return [min(self.config.span, math.ceil(z + self.config.ramp)) for z in widest]

    def _capacities(self, seen: list[int]) -> list[int]:
        block = BLOCK if self.training else 1
        return [min(-(-(far - 1) // block) * block, self.config.capacity) for far in seen]

    def facts(self) -> dict[str, Any]:
        spans = self.spans().detach()
        return {
            "span_mean_by_layer": [round(z, 1) for z in spans.mean(dim=1).tolist()],
            "span_max_by_layer": [round(z, 1) for z in spans.amax(dim=1).tolist()],
        }

    @property
    def reach(self) -> int:
        """Hops back, one per layer, each as far as its widest head looks."""
        return sum(far - 1 for far in self.distances_seen())

    @property
    def state_size(self) -> int:
        """Projected keys and values, of each layer as many as its widest head can see."""
        return 2 * self.config.heads * self.config.head_size * self.reach

    @property
    def tokens_to_fill(self) -> int:
        return max(self._capacities(self.distances_seen()))

    @property
    def has_memory(self) -> bool:
        return self.config.capacity > 0

    def initial_state(self, batch: int, *, projected: bool | None = None) -> State:
        """Nothing read yet: hidden states while training, projected keys and values with fixed weights. Layers keep
        unequally many positions; `length` counts the valid ones of the layer that keeps most."""
        projected = not self.training if projected is None else projected
        return empty_memory(self.config, self.embedding.tables[0], batch, projected=projected)

    def state_forms(self) -> list[State]:
        return [self.initial_state(1, projected=projected) for projected in (True, False)]

    def room(self, state: State) -> int:
        return held(state, alike=False)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        B, T = tokens.shape
        state = self.initial_state(B) if state is None else state
        require_memory(state, B, self.config.layers)
        seen = self.distances_seen()
        capacities = self._capacities(seen)
        R = dropped_sinusoids(self, self.dropout)
        hidden = [self.dropout(self.embedding(tokens))]
        kept: dict[str, tuple[Tensor, ...]] = dict.fromkeys(state.parts, ())
        layers: Any = self.layers
        for n, layer in enumerate(layers):
            # A span that has shrunk since leaves the far end of its memory unread.
            memory = {name: _last(part[n], capacities[n]) for name, part in state.parts.items()}
            remembered = next(iter(memory.values())).shape[-2]
            first_key = first_visible(state.length.clamp(max=remembered), remembered, T, starts)
            keys, values, after = with_memory(layer, hidden[-1], memory, capacities[n])
            kept = {name: (*kept[name], part) for name, part in after.items()}
            position = (layer.distances(min(seen[n], remembered + T), R), self.u, self.w)
            hidden.append(layer(hidden[-1], keys, values, position, None, first_key))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        longest = max(part.shape[-2] for part in next(iter(state.parts.values())))
        first_key = first_visible(state.length, longest, T, starts)
        return tuple(hidden), State(remaining(first_key, longest, max(capacities)), kept)

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Tensor = 0.0,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean loss; in training also the penalty on spans."""
        loss, state = super().training_loss(tokens, targets, state, progress, starts)
        if self.training:
            loss = loss + (self.config.span_penalty * self.spans().mean(dim=1).sum()).to(loss.dtype)
        return loss, state


def _last(positions: Tensor, count: int) -> Tensor:
    return positions.narrow(-2, positions.shape[-2] - count, count) if positions.shape[-2] > count else positions
