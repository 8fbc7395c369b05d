"""Learned vectors for places in a document."""

import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.shapes import Float, Int, Tensor


class LearnedPlaces(nn.Module):
    """One vector per place; with a `stride`, the sum of one for the row p // stride and one for the column p % stride.

    The sum is the factorised embedding of Child et al. 2019 for a text laid out in rows of `stride`.
    """

    def __init__(self, count: int, width: int, stride: int | None = None) -> None:
        super().__init__()
        self.count, self.stride = count, stride
        self.rows = nn.Parameter(torch.empty(count if stride is None else -(-count // stride), width))
        self.columns = None if stride is None else nn.Parameter(torch.empty(min(stride, count), width))

    def forward(self, tokens: int, first_key: Int[Tensor, "B T"] | None) -> Float[Tensor, "R T D"]:
        """The vectors of a segment, places counted from each document's first token; one row where rows are alike."""
        if tokens > self.count:
            raise ConfigError(
                f"this model has learned {self.count} positions and was handed {tokens} tokens at once; "
                f"use segments of at most {self.count}"
            )
        place = torch.arange(tokens, device=self.rows.device)[None]
        place = place if first_key is None else place - first_key
        if self.stride is None or self.columns is None:
            return self.rows[place]
        return self.rows[place // self.stride] + self.columns[place % self.stride]
