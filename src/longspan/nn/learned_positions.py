"""Learned absolute positions."""

import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.nn.positions import sinusoid
from longspan.shapes import Float, Int, Tensor


class LearnedPositions(nn.Module):
    """One vector per position p. With a `stride`, the sum of a vector for p // stride and one for p % stride: the
    factorised embedding of Child et al. 2019."""

    def __init__(self, count: int, width: int, stride: int | None = None) -> None:
        super().__init__()
        self.count, self.stride = count, stride
        self.rows = nn.Parameter(torch.empty(count if stride is None else -(-count // stride), width))
        self.columns = None if stride is None else nn.Parameter(torch.empty(min(stride, count), width))

    @torch.no_grad()
    def start_with_sinusoids(self, std: float = 0.05) -> None:
        """Begin training with the sinusoids of Vaswani et al. 2017, scaled to this standard deviation. A linear map
        takes one to its neighbour, so attention finds neighbours much earlier than among random vectors."""
        if self.rows.is_meta:
            return
        count, width = self.rows.shape
        self.rows.copy_(std * 2**0.5 * sinusoid(torch.arange(count, dtype=torch.float64), width))

    def check(self, tokens: int) -> None:
        check_positions(self.count, tokens)

    def forward(self, tokens: int, first_key: Int[Tensor, "B T"] | None) -> Float[Tensor, "R T D"]:
        """The vectors of a segment, counted from the first token of each document; a single row if all rows are
        equal."""
        self.check(tokens)
        position = torch.arange(tokens, device=self.rows.device)[None]
        position = position if first_key is None else position - first_key
        if self.stride is None or self.columns is None:
            return self.rows[position]
        return self.rows[position // self.stride] + self.columns[position % self.stride]


def check_positions(known: int, tokens: int) -> None:
    if tokens > known:
        raise ConfigError(
            f"a segment of {tokens} tokens is longer than the {known} positions that this model has learned; "
            f"use segments of at most {known}, or train with model.max_distance={tokens - 1} "
            f"(gpt, bert: model.positions={tokens})"
        )
