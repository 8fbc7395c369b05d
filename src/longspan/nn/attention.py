"""Multi-head attention over the keys and values of [cached positions; segment]."""

from typing import Any

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.kernels.causal_attention import causal_attention
from longspan.kernels.head_norm import head_norm
from longspan.kernels.relative_attention import relative_attention
from longspan.kernels.triton_works import TRITON_WORKS
from longspan.nn.memory_projection import memory_products
from longspan.shapes import Float, Tensor

RelativePosition = tuple[Float[Tensor, "H C D"], Float[Tensor, "H D"], Float[Tensor, "H D"]]
"""(r, u, w) of the four-term score."""


class HeadNorm(nn.RMSNorm):
    """RMS norm of each head, g * x / sqrt(mean(x^2)); the heads of a layer share the gains g."""

    fused: bool | None = None
    """Whether to use the kernels of kernels/head_norm; by default on a GPU, except for float64."""

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__(head_width, eps=1e-6)
        self.heads = heads

    def forward(self, x: Float[Tensor, "... E"]) -> Float[Tensor, "... E"]:
        suits = TRITON_WORKS and x.is_cuda and self.weight.dtype != torch.float64
        if suits if self.fused is None else self.fused:
            return head_norm(x, self.weight, self.eps or 0.0)
        # Computed in the dtype of the gains and cast back: under autocast queries, keys and values must agree.
        return super().forward(x.to(self.weight.dtype).unflatten(-1, (self.heads, -1))).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Projections to and from heads, without biases.

        q = drop(norm(h Wq))    k = drop(norm(h~ Wk))    v = drop(h~ Wv)    out = drop(Wo attend(q, k, v))

    The norms exist only with `qk_norm`, the first three dropouts only with `projection_dropout`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        dropout: float,
        attention_dropout: float,
        projection_dropout: float = 0.0,
        *,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key = nn.Linear(width, heads * head_width, bias=False)
        self.value = nn.Linear(width, heads * head_width, bias=False)
        self.output = nn.Linear(heads * head_width, width, bias=False)
        self.query_norm, self.key_norm = (HeadNorm(heads, head_width) if qk_norm else nn.Identity() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.attention_dropout = attention_dropout
        self.projection_dropout = nn.Dropout(projection_dropout) if projection_dropout else nn.Identity()

    def queries(self, h: Float[Tensor, "B L E"]) -> Float[Tensor, "B H L D"]:
        return split_heads(self.projection_dropout(self.query_norm(self.query(h))), self.heads)

    def keys_values(self, context: Float[Tensor, "B K E"]) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]:
        return self._split(self.key(context), self.value(context))

    def memory_keys_values(
        self, memory: Float[Tensor, "B M E"], segment: Float[Tensor, "B T E"], gain: Float[Tensor, "E"] | None
    ) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]:
        """Keys and values of [memory; segment], both times `gain`, without a gradient of the memory.

        Gains multiply the weights and not the inputs, so that their gradient comes from that of the weights.
        """
        weights = (part.weight if gain is None else part.weight * gain for part in (self.key, self.value))
        keys, values = memory_products(memory, segment, *weights)
        return self._split(keys, values)

    def _split(
        self, keys: Float[Tensor, "B K F"], values: Float[Tensor, "B K F"]
    ) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]:
        keys, values = self.projection_dropout(self.key_norm(keys)), self.projection_dropout(values)
        return split_heads(keys, self.heads), split_heads(values, self.heads)

    def attend(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H K D"],
        value: Float[Tensor, "B H K D"],
        mask: SegmentMask,
        position: RelativePosition | None = None,
    ) -> Float[Tensor, "B L E"]:
        """The output of every query; without `position`, scores have the content term only."""
        visible: dict[str, Any] = {"window": mask.window, "first_key": mask.first_key}
        dropout = self.attention_dropout if self.training else 0.0
        if position is None:
            output = causal_attention(query, key, value, **visible, dropout=dropout)
        else:
            r, u, w = (t.to(query.dtype) for t in position)
            output = relative_attention(query, key, value, r, u, w, **visible, dropout=dropout, discount=mask.discount)
        return self.project(output)

    def project(self, heads: Float[Tensor, "B H L D"]) -> Float[Tensor, "B L E"]:
        return self.dropout(self.output(merge_heads(heads)))


def split_heads(x: Float[Tensor, "B T E"], heads: int) -> Float[Tensor, "B H T D"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T E"]:
    return x.transpose(1, 2).flatten(2)


def without_biases(r: Float[Tensor, "H C D"]) -> RelativePosition:
    """(r, 0, 0): a position term without the global terms (c) and (d), as in Shaw et al. 2018."""
    zero = torch.zeros_like(r[:, 0])
    return r, zero, zero
