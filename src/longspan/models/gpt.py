"""GPT (Radford et al. 2018) and GPT-2 (Radford et al. 2019): a causal Transformer with learned positions. docs/gpt.md

    h = Table[x] + P[position]
    GPT      h = norm(h + attention(h))        h = norm(h + W2 gelu(W1 h))
    GPT-2    h = h + attention(norm(h))        h = h + W2 gelu(W1 norm(h))         and a norm after the last layer
    p(next token) = softmax(h Table^T + b)

GELU is the approximation with tanh. The papers have no b; imported models have b = 0.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from longspan.hints import Hints
from longspan.nn.biased_layer import BiasedConfig, BiasedLayer, initialise_normal
from longspan.nn.learned_positions import LearnedPositions
from longspan.nn.window_transformer import WindowTransformer


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BiasedConfig):
    norm: Literal["post", "pre"] = "pre"
    """`post` is GPT, `pre` is GPT-2."""


class GPT(WindowTransformer):
    Config: ClassVar[type] = GPTConfig
    layers: Any

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding(scaled=False)
        self.places = LearnedPositions(config.positions, config.width)
        self.layers = nn.ModuleList(
            BiasedLayer(config, config.norm, epsilon=1e-5, approximate="tanh") for _ in range(config.layers)
        )
        self.final_norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise_normal(self)
        if config.first_positions == "sinusoid":
            self.places.start_with_sinusoids()

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(graph_safe=True)
