"""What every Transformer of the house shares: the keys of its config, its residual form and its initial weights."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.layers.adaptive_softmax import AdaptiveSoftmax
from longspan.layers.attention import Attention, Position
from longspan.layers.embedding import AdaptiveEmbedding
from longspan.layers.feed_forward import FeedForward
from longspan.shapes import Float, Int, Tensor

# Beyond any model; what lies further would fail deep inside torch, or fill the machine before it does.
LARGEST = {"layers": 4096} | dict.fromkeys(("width", "heads", "head_width", "inner", "embedding_width"), 2**20)
LARGEST |= {"vocabulary": 2**24, "div_val": 2**20}
LARGEST |= dict.fromkeys(("segment", "memory", "clamp", "max_distance"), 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape, regularisation and token embedding; a family adds how it tells positions and what it remembers."""

    vocabulary: int = 256
    layers: int = 6
    width: int = 256
    heads: int = 4
    head_width: int | None = None
    inner: int | None = None
    segment: int = 128
    norm: Literal["post", "pre"] = "post"
    final_norm: bool = False
    activation: Literal["relu", "gelu", "squared-relu"] = "relu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    embedding_width: int | None = None
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    tie_embedding: bool = True
    tie_projections: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "heads", "segment", "div_val"):
            require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        for name, most in LARGEST.items():
            value = getattr(self, name, None)
            require(value is None or value <= most, f"model.{name}={value} is beyond the largest, {most}")
        for name in ("head_width", "inner", "embedding_width"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name}={value} must be at least 1")
        for name in ("dropout", "attention_dropout"):
            require(0 <= getattr(self, name) < 1, f"model.{name}={getattr(self, name)} must lie in [0, 1)")
        if self.head_width is None and self.width % self.heads:
            near = self.width // self.heads * self.heads
            ways = f"{near} or {near + self.heads}" if near else f"{near + self.heads}"
            raise ConfigError(f"model.width={self.width} is not divisible by heads={self.heads}; try {ways}")
        rising = all(a < b for a, b in pairwise((0, *self.cutoffs, self.vocabulary)))
        require(
            rising,
            f"model.cutoffs={list(self.cutoffs)} must rise and lie between 0 and the vocabulary of {self.vocabulary}",
        )
        narrowest = (self.embedding_width or self.width) // self.div_val ** len(self.cutoffs)
        require(
            narrowest >= 1,
            f"model.div_val={self.div_val} leaves the rarest of {len(self.cutoffs) + 1} clusters no width; "
            "try a smaller div_val or fewer cutoffs",
        )

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def inner_size(self) -> int:
        return self.inner or 4 * self.width

    def rough_parameters(self) -> int:
        """Projections, feed-forward and embedding: enough to tell a model that cannot fit from one that can."""
        layer = self.width * (4 * self.heads * self.head_size + 2 * self.inner_size)
        return self.layers * layer + self.vocabulary * (self.embedding_width or self.width)

    def make_embedding(self) -> AdaptiveEmbedding:
        return AdaptiveEmbedding(
            self.vocabulary, self.width, self.embedding_width or self.width, self.cutoffs, self.div_val
        )

    def make_head(self, embedding: AdaptiveEmbedding, *, tied: bool = True) -> AdaptiveSoftmax:
        """The softmax; where it may be `tied` to the embedding, it is what the config says."""
        return AdaptiveSoftmax(
            embedding,
            self.vocabulary,
            self.cutoffs,
            tie_embedding=tied and self.tie_embedding,
            tie_projections=tied and self.tie_projections,
        )

    def make_feed_forward(self) -> FeedForward:
        return FeedForward(self.width, self.inner_size, self.activation, self.dropout)


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)


def settle_max_distance(config: TransformerConfig, learned: bool, needed: int) -> None:
    """Give `max_distance` its value where positions are learned: what a segment needs unless it was given."""
    given = getattr(config, "max_distance")  # noqa: B009 (a key of those families that learn positions)
    require(given is None or given >= 0, f"model.max_distance={given} must not be negative")
    object.__setattr__(config, "max_distance", (needed if given is None else given) if learned else None)


class Residual(nn.Module):
    """norm(x + f(x)) as published, or x + f(norm(x)); `inputs` is what f reads."""

    def __init__(self, width: int, form: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.before = form == "pre"

    def inputs(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.norm(x) if self.before else x

    def forward(self, x: Float[Tensor, "B T D"], change: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x + change if self.before else self.norm(x + change)


class TransformerLayer(nn.Module):
    """Attention over given keys and values, then feed-forward; a family adds how it tells positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        heads, size = config.heads, config.head_size
        self.attention = Attention(config.width, heads, size, config.dropout, config.attention_dropout)
        self.attention_residual = Residual(config.width, config.norm)
        self.feed_forward = config.make_feed_forward()
        self.feed_forward_residual = Residual(config.width, config.norm)

    def keys_values(self, h: Float[Tensor, "B T E"]) -> tuple[Tensor, Tensor]:
        return self.attention.keys_values(self.attention_residual.inputs(h))

    def forward(
        self,
        h: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        position: Position | None,
        window: int | None,
        first_key: Int[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B T E"]:
        query = self.attention.queries(self.attention_residual.inputs(h))
        h = self.attention_residual(h, self.attention.attend(query, keys, values, position, window, first_key))
        return self.feed_forward_residual(h, self.feed_forward(self.feed_forward_residual.inputs(h)))


@torch.no_grad()
def initialise(model: nn.Module, std: float = 0.02, projection_std: float = 0.01) -> None:
    """The authors' initial weights: N(0, 0.02) for matrices and vectors, N(0, 0.01) for projections of the embedding,
    N(1, 0.02) for the gains of norms, zero for biases."""
    gains = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    for name, parameter in model.named_parameters():
        if id(parameter) in gains:
            parameter.normal_(1.0, std)
        elif name.endswith("bias") or ".biases." in name:
            parameter.zero_()
        else:
            parameter.normal_(0.0, projection_std if "projections" in name else std)
