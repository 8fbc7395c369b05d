"""Learned absolute positions."""

from typing import Literal

import torch
from torch import nn

from longspan.errors import ConfigError, counted
from longspan.nn.positions import sinusoid
from longspan.shapes import Float, Int, Tensor

Key = Literal["positions", "max_distance"]
"""The key of a config that sets the number of positions: the number, or the last position."""


class LearnedPositions(nn.Module):
    """One vector per position p. With a `stride`, the sum of a vector for p // stride and one for p % stride: the
    factorised embedding of Child et al. 2019."""

    def __init__(self, count: int, width: int, stride: int | None = None, *, key: Key = "positions") -> None:
        """`key` is the one of the config that `count` follows from, for errors."""
        super().__init__()
        self.count, self.stride, self.key = count, stride, key
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

    def check(self, segment: int) -> None:
        """Raise a ConfigError if the segments of a reading are too long."""
        check_positions(self.count, segment, self.key, of_reading=True)

    def forward(self, tokens: int, first_key: Int[Tensor, "B T"] | None) -> Float[Tensor, "R T D"]:
        """The vectors of a segment, counted from the first token of each document; a single row if all rows are
        equal."""
        check_positions(self.count, tokens, self.key)
        position = torch.arange(tokens, device=self.rows.device)[None]
        position = position if first_key is None else position - first_key
        if self.stride is None or self.columns is None:
            return self.rows[position]
        return self.rows[position // self.stride] + self.columns[position % self.stride]


def check_positions(known: int, tokens: int, key: Key, *, of_reading: bool = False) -> None:
    """Raise a ConfigError if a segment of `tokens`, one that was passed or that of a reading, has more positions."""
    if tokens > known:
        what = f"segment={tokens}" if of_reading else f"a segment of {counted(tokens, 'token')}"
        needed = tokens - 1 if key == "max_distance" else tokens
        raise ConfigError(
            f"{what} is longer than the {counted(known, 'learned position')}; use a segment of at most {known}, or "
            f"train with model.{key}={needed}"
        )
