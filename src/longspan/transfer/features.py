"""Features of a token from the hidden states of all layers (Devlin et al. 2019, table 7; Peters et al. 2018)."""

from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from longspan.errors import ConfigError, UnknownNameError, counted
from longspan.shapes import Float, Tensor

Features = Literal["last", "embedding", "second-to-last", "sum", "sum-last-four", "concat-last-four", "mix"]
COMBINED = tuple(name for name in get_args(Features) if name != "mix")
"""Features without weights of their own."""
T = TypeVar("T")


class ScalarMix(nn.Module):
    """gamma sum_k softmax(s)_k h_k with learned s and gamma, over the embedding and all layers: the task's weights of
    ELMo, equation 1."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(count))
        self.gamma = nn.Parameter(torch.ones(1))  # a vector, because scalars cannot be sharded

    def forward(self, hidden: Sequence[Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
        weights = self.scores.softmax(0)
        return self.gamma * sum(weight * h for weight, h in zip(weights, hidden, strict=True))


def width_of(widths: Sequence[int], how: str) -> int:
    """The width of the features, from those of the embedding and the layers. Sums need layers of one width, and the
    last four need four layers."""
    if how in ("last", "embedding", "second-to-last"):
        return {"last": widths[-1], "embedding": widths[0], "second-to-last": widths[-2]}[how]
    chosen = list(widths if how == "mix" else _added(widths, how))
    if len(set(chosen)) > 1:
        known = "embedding, last or second-to-last"
        raise ConfigError(f"features={how!r} needs layers of one width; this model has {chosen}; use {known}")
    if how.endswith("-last-four") and len(chosen) < 4:
        layers = counted(len(chosen), "layer")
        raise ConfigError(f"features={how!r} needs at least 4 layers; this model has {layers}; use sum, last or mix")
    return chosen[0] * (len(chosen) if how == "concat-last-four" else 1)


def _added(layers: Sequence[T], how: str) -> Sequence[T]:
    """What is added or concatenated, without the embedding."""
    return layers[1:] if how == "sum" else layers[1:][-4:]


def combine(hidden: Sequence[Tensor], how: str) -> Tensor:
    """The features of every position, from the embedding (`hidden[0]`) and the outputs of the layers. The sum is over
    the layers without the embedding."""
    if how == "last":
        return hidden[-1]
    if how == "embedding":
        return hidden[0]
    if how == "second-to-last":
        return hidden[-2]
    if how not in COMBINED:
        raise UnknownNameError("kind of features", how, COMBINED)
    width_of([h.shape[-1] for h in hidden], how)
    chosen = list(_added(hidden, how))
    return torch.cat(chosen, dim=-1) if how == "concat-last-four" else torch.stack(chosen).sum(0)
