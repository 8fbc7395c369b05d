"""The Evolved Transformer (So et al. 2019): its decoder block as a language model, without memory. docs/evolved.md

    h = h + attend(norm h)                                                     twice `heads` heads
    h = h + conv7(norm(relu(conv11(norm h)) + [conv7'(norm h) ; 0]))           widths 2E, E/2 padded to 2E, then E
    h = h + attend(norm h)                                                     `heads` heads
    h = h + W2 norm(swish(W1 norm h))

Convolutions are separable, causal, and stay within their document.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from torch.nn import functional as F

from longspan.cache import SegmentMask
from longspan.contract import State
from longspan.nn.attention import Attention
from longspan.nn.convolution import CausalSeparableConvolution
from longspan.nn.feed_forward import ACTIVATIONS
from longspan.nn.model_config import require
from longspan.nn.positions import position_in_document, position_sinusoid
from longspan.nn.transformer import Residual, TransformerConfig, initialise
from longspan.nn.window_transformer import WindowModel
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class EvolvedConfig(TransformerConfig):
    heads: int = 8
    norm: Literal["post", "pre"] = "pre"
    final_norm: bool = True
    activation: Literal["relu", "gelu", "squared-relu", "swish"] = "swish"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.width % 2 == 0,
            f"model.width={self.width} must be even, because one convolution branch has half the width; use an "
            "even number",
        )
        require(
            self.head_size % 2 == 0,
            f"a head of width {self.head_size} must be even: the first attention has twice model.heads={self.heads} "
            "heads of half that width; use an even model.head_width",
        )


class EvolvedLayer(nn.Module):
    """Wide attention, branched convolutions, attention, feed-forward, each with its residual."""

    def __init__(self, config: EvolvedConfig) -> None:
        super().__init__()
        width, heads, size = config.width, config.heads, config.head_size
        drops = (config.dropout, config.attention_dropout)
        self.wide_attention = Attention(width, 2 * heads, size // 2, *drops, qk_norm=config.qk_norm)
        self.left = CausalSeparableConvolution(width, 2 * width, 11)
        self.right = CausalSeparableConvolution(width, width // 2, 7)
        self.branch_norm = nn.LayerNorm(2 * width)
        self.joined = CausalSeparableConvolution(2 * width, width, 7)
        self.attention = Attention(width, heads, size, *drops, qk_norm=config.qk_norm)
        self.up = nn.Linear(width, config.inner_size)
        self.inner_norm = nn.LayerNorm(config.inner_size)
        self.down = nn.Linear(config.inner_size, width)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(4))

    def forward(self, h: Float[Tensor, "B T E"], mask: SegmentMask) -> Float[Tensor, "B T E"]:
        wide, branches, narrow, dense = self.residuals
        h = wide(h, _attend(self.wide_attention, wide.inputs(h), mask))  # type: ignore[operator]
        h = branches(h, self._convolve(branches.inputs(h), mask.first_key))  # type: ignore[operator]
        h = narrow(h, _attend(self.attention, narrow.inputs(h), mask))  # type: ignore[operator]
        return dense(h, self._feed(dense.inputs(h)))  # type: ignore[operator]

    def _convolve(self, x: Float[Tensor, "B T E"], first_key: Int[Tensor, "B T"] | None) -> Float[Tensor, "B T E"]:
        left = self.dropout(F.relu(self.left(x, first_key)))
        right = self.dropout(self.right(x, first_key))
        both = left + F.pad(right, (0, left.shape[-1] - right.shape[-1]))
        return self.dropout(self.joined(self.branch_norm(both), first_key))

    def _feed(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return self.dropout(self.down(self.inner_norm(self.dropout(self.activation(self.up(x))))))


def _attend(attention: Attention, x: Float[Tensor, "B T E"], mask: SegmentMask) -> Float[Tensor, "B T E"]:
    return attention.attend(attention.queries(x), *attention.keys_values(x), mask)


class Evolved(WindowModel):
    Config: ClassVar[type] = EvolvedConfig

    def __init__(self, config: EvolvedConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(EvolvedLayer(config) for _ in range(config.layers))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)
        for module in self.modules():
            if isinstance(module, CausalSeparableConvolution):
                module.reset()

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        state, mask = self.begin(tokens, state, starts)
        h = self.embedding(tokens)
        position = position_in_document(mask.first_key, mask.tokens, tokens.device)
        hidden = [self.dropout(h + position_sinusoid(position, self.config.width).to(h.dtype))]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], mask))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        return tuple(hidden), state
