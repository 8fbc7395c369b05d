"""Features of a token from the hidden states of all layers (Devlin et al. 2019, table 7; Peters et al. 2018)."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn

from longspan.errors import ConfigError, UnknownNameError
from longspan.shapes import Float, Tensor

Features = Literal["last", "embedding", "second-to-last", "sum", "sum-last-four", "concat-last-four", "mix"]


class ScalarMix(nn.Module):
    """gamma sum_k softmax(s)_k h_k with learned s and gamma, over the embedding and all layers: the task's weights of
    ELMo, equation 1."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(count))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
        weights = self.scores.softmax(0)
        return self.gamma * sum(weight * h for weight, h in zip(weights, hidden, strict=True))


def combine(hidden: Sequence[Tensor], how: str) -> Tensor:
    """The features of every position, from the embedding (`hidden[0]`) and the outputs of the layers. The sum is over
    the layers without the embedding."""
    if how == "last":
        return hidden[-1]
    if how == "embedding":
        return hidden[0]
    if how == "second-to-last":
        return hidden[-2]
    if how not in get_args(Features):
        raise UnknownNameError("kind of features", how, get_args(Features))
    chosen = hidden[1:] if how == "sum" else hidden[1:][-4:]
    if len({h.shape for h in chosen}) > 1:
        raise ConfigError(f"features={how!r} needs layers of one width; this model has {[h.shape[-1] for h in chosen]}")
    return torch.cat(list(chosen), dim=-1) if how == "concat-last-four" else torch.stack(list(chosen)).sum(0)
