"""What every Transformer of the house shares: the keys of its config, its residual form and its initial weights."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.layers.attention import Attention
from longspan.layers.convolution import ShortConvolution
from longspan.layers.copying import Copying
from longspan.layers.dropout import WordBlanking
from longspan.layers.feed_forward import FeedForward, GatedFeedForward
from longspan.layers.model_config import ModelConfig, require
from longspan.layers.penalties import ActivationPenalty
from longspan.shapes import Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Heads, feed-forward, norms; a family adds how it tells positions and what it remembers."""

    heads: int = 4
    head_width: int | None = None
    inner: int | None = None
    norm: Literal["post", "pre"] = "post"
    norm_type: Literal["layer", "rms"] = "layer"
    final_norm: bool = False
    activation: Literal["relu", "gelu", "squared-relu", "swish", "swiglu"] = "relu"
    biases: bool = True
    qk_norm: bool = False
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.heads >= 1, f"model.heads={self.heads} must be at least 1")
        for name in ("head_width", "inner"):
            self.require_width(name)
        self.require_rate("attention_dropout")
        if self.head_width is None and self.width % self.heads:
            near = self.width // self.heads * self.heads
            ways = f"{near} or {near + self.heads}" if near else f"{near + self.heads}"
            raise ConfigError(f"model.width={self.width} is not divisible by heads={self.heads}; try {ways}")

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def inner_size(self) -> int:
        return self.inner or 4 * self.width

    def rough_parameters(self) -> int:
        """Projections, feed-forward and embedding: enough to tell a model that cannot fit from one that can."""
        matrices = 3 if self.activation == "swiglu" else 2
        layer = self.width * (4 * self.heads * self.head_size + matrices * self.inner_size)
        return self.layers * layer + self.vocabulary * (self.embedding_width or self.width)

    def make_attention(self) -> Attention:
        drops = (self.dropout, self.attention_dropout)
        return Attention(self.width, self.heads, self.head_size, *drops, qk_norm=self.qk_norm)

    def make_feed_forward(self) -> nn.Module:
        if self.activation == "swiglu":
            return GatedFeedForward(self.width, self.inner_size, self.dropout, bias=self.biases)
        return FeedForward(self.width, self.inner_size, self.activation, self.dropout, bias=self.biases)

    def make_norm(self) -> nn.Module:
        return nn.RMSNorm(self.width, eps=1e-6) if self.norm_type == "rms" else nn.LayerNorm(self.width)

    def make_final_norm(self) -> nn.Module:
        return self.make_norm() if self.final_norm else nn.Identity()


@dataclass(frozen=True, kw_only=True)
class ConvolvingConfig(TransformerConfig):
    """The same with a short convolution over every layer's input, of `convolution` earlier positions; 0 for none."""

    convolution: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.convolution >= 0, f"model.convolution={self.convolution} must not be negative; 0 turns it off")

    def make_convolutions(self) -> nn.ModuleList:
        """One for each layer; none where there are no taps."""
        count = self.layers if self.convolution else 0
        return nn.ModuleList(ShortConvolution(self.convolution, self.width) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class RememberingConfig(ConvolvingConfig):
    """The same with a memory of the last `memory` positions of every layer's input, the last `copy` positions to copy
    tokens from (by weights that a `copy_width` gives it), and what keeps a model from learning a small text by heart:
    dropout of words, of the embedded input and of the output (as `dropout` unless given), of queries, keys and values;
    penalties on the output."""

    memory: int = 128
    same_length: bool = False
    copy: int = 0
    copy_width: int = 0
    embedding_dropout: float = 0.0
    input_dropout: float | None = None
    output_dropout: float | None = None
    projection_dropout: float = 0.0
    ar: float = 0.0
    tar: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding_dropout", "input_dropout", "output_dropout", "projection_dropout"):
            self.require_rate(name)
        for name in ("ar", "tar"):
            self.require_penalty(name)
        require(self.memory >= 0, f"model.memory={self.memory} must not be negative")
        require(self.copy >= 0, f"model.copy={self.copy} must not be negative; 0 turns it off")
        require(self.copy_width >= 0, f"model.copy_width={self.copy_width} must not be negative; 0 turns it off")
        require(
            self.copy_width > 0 or self.copy == 0,
            f"model.copy={self.copy} needs the weights that model.copy_width=0 leaves out; "
            "train with a copy_width, or set model.copy=0",
        )
        require(
            self.memory > 0 or self.copy == 0,
            f"model.copy={self.copy} needs something to remember, and model.memory=0 leaves nothing; "
            "raise the memory or set model.copy=0",
        )
        require(
            self.memory > 0 or not self.same_length,
            "model.same_length gives every query model.memory keys, and model.memory=0 leaves it none; "
            "raise the memory or turn same_length off",
        )
        require(
            self.memory == 0 or self.memory >= self.convolution,
            f"model.memory={self.memory} is shorter than the {self.convolution} positions model.convolution takes in; "
            f"use {self.convolution} or more, or 0 for none",
        )

    @property
    def window(self) -> int | None:
        """With same_length a query sees distances 0..memory-1, itself included."""
        return self.memory if self.same_length else None

    def make_attention(self) -> Attention:
        drops = (self.dropout, self.attention_dropout, self.projection_dropout)
        return Attention(self.width, self.heads, self.head_size, *drops, qk_norm=self.qk_norm)

    def make_dropouts(self) -> tuple[WordBlanking, nn.Dropout, nn.Dropout]:
        """Of words, of the embedded input and of the output."""
        first, last = (self.dropout if p is None else p for p in (self.input_dropout, self.output_dropout))
        return WordBlanking(self.vocabulary, self.embedding_dropout), nn.Dropout(first), nn.Dropout(last)

    def make_copying(self) -> Copying | None:
        return Copying(self.width, self.copy_width) if self.copy_width else None

    def make_penalty(self) -> ActivationPenalty | None:
        return ActivationPenalty(self.ar, self.tar) if self.ar or self.tar else None


def settle_max_distance(config: TransformerConfig, learned: bool, needed: int) -> None:
    """Give `max_distance` its value where positions are learned: what a segment needs unless it was given."""
    given = getattr(config, "max_distance")  # noqa: B009 (a key of those families that learn positions)
    require(given is None or given >= 0, f"model.max_distance={given} must not be negative")
    object.__setattr__(config, "max_distance", (needed if given is None else given) if learned else None)


class Residual(nn.Module):
    """norm(x + f(x)) as published, or x + f(norm(x)); `inputs` is what f reads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = config.make_norm()
        self.before = config.norm == "pre"

    def inputs(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.norm(x) if self.before else x

    def forward(self, x: Float[Tensor, "B T D"], change: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x + change if self.before else self.norm(x + change)


class TransformerLayer(nn.Module):
    """Attention over given keys and values, then feed-forward; a family adds how it tells positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = config.make_attention()
        self.attention_residual = Residual(config)
        self.feed_forward = config.make_feed_forward()
        self.feed_forward_residual = Residual(config)

    def keys_values(self, h: Float[Tensor, "B T E"]) -> tuple[Tensor, Tensor]:
        return self.attention.keys_values(self.attention_residual.inputs(h))

    def forward(
        self,
        h: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        position: Any,
        window: int | None,
        first_key: Int[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B T E"]:
        query = self.attention.queries(self.attention_residual.inputs(h))
        h = self.attention_residual(h, self.attend(query, keys, values, position, window, first_key))
        return self.feed_forward_residual(h, self.feed_forward(self.feed_forward_residual.inputs(h)))

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, position: Any, window: int | None, first_key: Tensor | None
    ) -> Float[Tensor, "B T E"]:
        """What each position reads; `position` as the family's `positions` gives it."""
        return self.attention.attend(query, keys, values, position, window, first_key)


@torch.no_grad()
def initialise(model: nn.Module, std: float = 0.02, projection_std: float = 0.01) -> None:
    """The authors' initial weights: N(0, 0.02) for matrices and vectors, N(0, 0.01) for projections of the embedding,
    N(1, 0.02) for the gains of norms, zero for biases."""
    gains = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # an outline: there is nothing to draw, and pretending to takes its time
            continue
        if id(parameter) in gains:
            parameter.normal_(1.0, std)
        elif name.endswith("bias") or ".biases." in name:
            parameter.zero_()
        else:
            parameter.normal_(0.0, projection_std if "projections" in name else std)
