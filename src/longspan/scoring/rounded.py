"""Rounded copies of weights for matrix products, so that no cast is needed while a model learns.

Autocast rounds every weight in every segment and casts every gradient back, in two kernels per weight. Here the rounded
copy takes the place of the weight in the model, its gradient stays rounded, and the update writes both. The numbers are
the same, if the only use of the weight is one cast.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from longspan.shapes import Float, Tensor


def only_cast(losses: Float[Tensor, "..."], weights: Sequence[Tensor], dtype: torch.dtype) -> list[bool]:
    """For every weight: whether the losses depend on it only through one cast to this dtype."""
    users: dict[Any, list[Any]] = {losses.grad_fn: []}
    waiting: list[Any] = [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        for used, _ in node.next_functions:
            if used is not None:
                if used not in users:
                    users[used] = []
                    waiting.append(used)
                users[used].append(node)
    casts = {
        id(node.variable): found[0]
        for node, found in users.items()
        if hasattr(node, "variable") and len(found) == 1 and type(found[0]).__name__ == "ToCopyBackward0"
    }
    return [id(weight) in casts and casts[id(weight)]._input_metadata[0].dtype == dtype for weight in weights]


class RoundedWeights:
    """Copies of some weights of a model, in place of those weights until `remove`."""

    def __init__(self, model: nn.Module, weights: Sequence[Tensor], chosen: Sequence[bool], dtype: torch.dtype) -> None:
        self.copies = [
            nn.Parameter(weight.detach().to(dtype)) if use else None
            for weight, use in zip(weights, chosen, strict=True)
        ]
        of = {id(weight): copy for weight, copy in zip(weights, self.copies, strict=True) if copy is not None}
        self.places = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module._parameters.items()
            if weight is not None and id(weight) in of
        ]
        for module, name, weight in self.places:
            module._parameters[name] = of[id(weight)]

    def remove(self) -> None:
        for module, name, weight in self.places:
            module._parameters[name] = weight
