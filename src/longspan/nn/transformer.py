"""Parts that Transformer families share: config keys, residuals, the layer, initial weights."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache import AttentionCache, ConvolutionCache, SegmentMask, extend
from longspan.nn.attention import Attention
from longspan.nn.convolution import ShortConvolution
from longspan.nn.feed_forward import FeedForward, GatedFeedForward
from longspan.nn.model_config import HeadsConfig, require
from longspan.shapes import Float, Tensor


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(HeadsConfig):
    """Heads, feed-forward and norms; families add positions."""

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
class ConvolutionConfig(TransformerConfig):
    """Adds a short convolution at the input of every layer, over the last `convolution` positions; 0 for none."""

    convolution: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.convolution >= 0, f"model.convolution={self.convolution} must not be negative; 0 turns it off")

    def make_convolution(self) -> ShortConvolution | None:
        return ShortConvolution(self.convolution, self.width) if self.convolution else None


def resolve_max_distance(config: Any, learned: bool, default: int) -> None:
    """Set `max_distance` of a frozen config: the given value or the default if positions are learned, else None."""
    given = config.max_distance
    require(given is None or given >= 0, f"model.max_distance={given} must not be negative")
    object.__setattr__(config, "max_distance", (default if given is None else given) if learned else None)


class Residual(nn.Module):
    """norm(x + f(x)) (post-norm) or x + f(norm(x)) (pre-norm); `inputs` gives the argument of f."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = config.make_norm()
        self.pre_norm = config.norm == "pre"

    def inputs(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.norm(x) if self.pre_norm else x

    def forward(self, x: Float[Tensor, "B T D"], change: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x + change if self.pre_norm else self.norm(x + change)


class TransformerLayer(nn.Module):
    """Attention over [cached positions; segment], then feed-forward: `x, cache = layer(x, cache, mask, position)`.

    Without a cache it attends to the segment only. A family overrides `attend` for its own kind of attention.
    """

    detached_memory: bool | None = None
    """Whether training leaves out the gradient of the memory, which is cut off in any case. Default: on a GPU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = config.make_attention()
        self.attention_residual = Residual(config)
        self.feed_forward = config.make_feed_forward()
        self.feed_forward_residual = Residual(config)

    def keys_values(self, context: Float[Tensor, "B K E"]) -> tuple[Tensor, Tensor]:
        return self.attention.keys_values(self.attention_residual.inputs(context))

    def memory_keys_values(self, memory: Float[Tensor, "B M E"], x: Float[Tensor, "B T E"]) -> tuple[Tensor, Tensor]:
        """`keys_values` of [memory; segment] for training. Not for a layer norm before attention, which has biases."""
        norm = self.attention_residual.norm
        if not self.attention_residual.pre_norm:
            return self.attention.memory_keys_values(memory, x, None)
        if not isinstance(norm, nn.RMSNorm):
            return self.keys_values(torch.cat([memory.to(x.dtype), x], dim=1))
        memory, x = (F.rms_norm(part, norm.normalized_shape, None, norm.eps) for part in (memory, x))
        return self.attention.memory_keys_values(memory, x, norm.weight)

    def forward(
        self, x: Float[Tensor, "B T E"], cache: AttentionCache | None, mask: SegmentMask, position: Any = None
    ) -> tuple[Float[Tensor, "B T E"], AttentionCache | None]:
        detached = x.is_cuda if self.detached_memory is None else self.detached_memory
        both = self.memory_keys_values if detached and torch.is_grad_enabled() else None
        keys, values, cache = extend(cache, x, self.keys_values, mask.memory, both)
        x = self.attention_residual(x, self.attend(self.attention_residual.inputs(x), keys, values, mask, position))
        return self.feed_forward_residual(x, self.feed_forward(self.feed_forward_residual.inputs(x))), cache

    def attend(
        self, inputs: Float[Tensor, "B T E"], keys: Tensor, values: Tensor, mask: SegmentMask, position: Any
    ) -> Float[Tensor, "B T E"]:
        """The attention output of every token; `position` is the position argument that the model passes to its
        layers."""
        return self.attention.attend(self.attention.queries(inputs), keys, values, mask, position)


class ConvolutionLayer(TransformerLayer):
    """The same with a short convolution of its input, if the config has one."""

    def __init__(self, config: ConvolutionConfig) -> None:
        super().__init__(config)
        self.convolution = config.make_convolution()

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B T E"],
        cache: AttentionCache | ConvolutionCache | None,
        mask: SegmentMask,
        position: Any = None,
    ) -> tuple[Float[Tensor, "B T E"], AttentionCache | ConvolutionCache | None]:
        if self.convolution is None:
            return super().forward(x, cache, mask, position)  # type: ignore[arg-type]
        if cache is None:
            x, _ = self.convolution(x, None, mask)
            return super().forward(x, None, mask, position)
        assert isinstance(cache, ConvolutionCache)
        x, inputs = self.convolution(x, cache.inputs, mask)
        x, attention = super().forward(x, cache.attention, mask, position)
        return x, ConvolutionCache(attention, inputs)  # type: ignore[arg-type]


@torch.no_grad()
def initialise(model: nn.Module, std: float = 0.02, projection_std: float = 0.01) -> None:
    """The authors' initial weights: N(0, 0.02) for matrices and vectors, N(0, 0.01) for projections of the embedding,
    N(1, 0.02) for the gains of norms, zero for biases."""
    gains = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # no values, and random functions still take time
            continue
        if id(parameter) in gains:
            parameter.normal_(1.0, std)
        elif name.endswith("bias") or ".biases." in name:
            parameter.zero_()
        else:
            parameter.normal_(0.0, projection_std if "projections" in name else std)
