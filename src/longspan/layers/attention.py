"""Multi-head attention over keys and values that may reach beyond the segment."""

import torch
from torch import nn

from longspan.kernels.causal_attention import causal_attention
from longspan.kernels.relative_attention import relative_attention
from longspan.shapes import Float, Int, Tensor

Position = tuple[Float[Tensor, "H C D"], Float[Tensor, "H D"], Float[Tensor, "H D"]]
"""(r, u, w) of the four-term score."""


class HeadNorm(nn.RMSNorm):
    """g * x / sqrt(mean(x^2)) over the width of each head; the gains g are shared by the heads of a layer."""

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__(head_width, eps=1e-6)
        self.heads = heads

    def forward(self, x: Float[Tensor, "... E"]) -> Float[Tensor, "... E"]:
        # Under mixed precision in that of the gains, then back: attention takes queries, keys and values of one kind.
        return super().forward(x.to(self.weight.dtype).unflatten(-1, (self.heads, -1))).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Projections to and from heads; who sees what, and how positions enter, is the caller's business.

        q = drop(norm(h Wq))    k = drop(norm(h~ Wk))    v = drop(h~ Wv)    out = drop(Wo attend(q, k, v))

    No biases, as published; there is a norm with `qk_norm` alone, and the first three are whole unless
    `projection_dropout` is given.
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
        keys = self.projection_dropout(self.key_norm(self.key(context)))
        values = self.projection_dropout(self.value(context))
        return split_heads(keys, self.heads), split_heads(values, self.heads)

    def attend(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H K D"],
        value: Float[Tensor, "B H K D"],
        position: Position | None,
        window: int | None = None,
        first_key: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L E"]:
        """What each position reads; `position` is (r, u, w) of the four-term score, or None for content alone."""
        dropout = self.attention_dropout if self.training else 0.0
        if position is None:
            read = causal_attention(query, key, value, window=window, first_key=first_key, dropout=dropout)
        else:
            distance, u, w = (t.to(query.dtype) for t in position)
            read = relative_attention(
                query, key, value, distance, u, w, window=window, first_key=first_key, dropout=dropout
            )
        return self.dropout(self.output(merge_heads(read)))


def split_heads(x: Float[Tensor, "B T E"], heads: int) -> Float[Tensor, "B H T D"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T E"]:
    return x.transpose(1, 2).flatten(2)


def no_biases(distance: Float[Tensor, "H C D"]) -> Position:
    """(r, 0, 0): a position term without global terms (c) and (d), as Shaw et al. have it."""
    zero = torch.zeros_like(distance[:, 0])
    return distance, zero, zero
