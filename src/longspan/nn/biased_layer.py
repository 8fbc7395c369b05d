"""The Transformer layer of GPT and BERT: all projections have biases, and the activation is GELU."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache import SegmentMask
from longspan.kernels.causal_attention import causal_attention
from longspan.nn.attention import merge_heads, split_heads
from longspan.nn.model_config import HeadsConfig, require
from longspan.shapes import Bool, Float, Tensor


@dataclass(frozen=True, kw_only=True)
class BiasedConfig(HeadsConfig):
    heads: int = 4
    inner: int | None = None
    positions: int = 512
    """Positions with a learned vector: the longest segment."""
    attention_dropout: float = 0.0
    first_positions: Literal["normal", "sinusoid"] = "normal"
    """The vectors of positions before training: random, or sinusoids."""

    head_width = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.positions >= 1, f"model.positions={self.positions} must be at least 1")


class Bidirectional(NamedTuple):
    """A mask without an order: every token attends to the allowed ones before and after it."""

    allowed: Bool[Tensor, "B 1 T T"] | None
    """None: all of them."""


class BiasedLayer(nn.Module):
    """Post-norm or pre-norm; causal or bidirectional, as the mask says."""

    def __init__(
        self,
        config: BiasedConfig,
        norm: Literal["post", "pre"],
        *,
        epsilon: float,
        approximate: Literal["none", "tanh"],
    ) -> None:
        super().__init__()
        E = config.width
        self.heads, self.pre_norm, self.approximate = config.heads, norm == "pre", approximate
        self.attention_dropout = config.attention_dropout
        self.query, self.key, self.value, self.output = (nn.Linear(E, E) for _ in range(4))
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(E, eps=epsilon) for _ in range(2))
        self.up, self.down = nn.Linear(E, config.inner_size), nn.Linear(config.inner_size, E)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        cache: None,  # noqa: ARG002 (the signature of all layers)
        mask: SegmentMask | Bidirectional,
    ) -> tuple[Float[Tensor, "B T E"], None]:
        """norm(x + attention(x)), norm(x + feed_forward(x)), or with the norms before."""
        if self.pre_norm:
            x = x + self.attention(self.attention_norm(x), mask)
            return x + self.feed_forward(self.feed_forward_norm(x)), None
        x = self.attention_norm(x + self.attention(x, mask))
        return self.feed_forward_norm(x + self.feed_forward(x)), None

    def attention(self, x: Float[Tensor, "B T E"], mask: SegmentMask | Bidirectional) -> Float[Tensor, "B T E"]:
        query, key, value = (split_heads(part(x), self.heads) for part in (self.query, self.key, self.value))
        dropout = self.attention_dropout if self.training else 0.0
        if isinstance(mask, Bidirectional):
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.allowed, dropout_p=dropout)
        else:
            found = causal_attention(query, key, value, first_key=mask.first_key, dropout=dropout)
        return self.dropout(self.output(merge_heads(found)))

    def feed_forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return self.dropout(self.down(F.gelu(self.up(x), approximate=self.approximate)))


@torch.no_grad()
def initialise_normal(model: nn.Module, std: float = 0.02) -> None:
    """N(0, std) for weights, zero for biases, one for the gains of norms: Radford et al. 2018, Devlin et al. 2019."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue  # there is nothing to draw, and torch would import its compiler for it
        if "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias") or ".biases." in name:
            parameter.zero_()
        else:
            parameter.normal_(0.0, std)
