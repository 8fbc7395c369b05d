"""The depth of parameters, for discriminative learning rates and gradual unfreezing (Howard & Ruder 2018)."""

import re

from torch import nn

_LAYER = re.compile(r"(?:^|\.)(?:backward_)?layers\.(\d+)\.")
_INPUT = re.compile(r"(?:^|\.)(embedding|embedding_norm|places|segments|query_start)(?:\.|$)")
_SHARED = re.compile(r"^(?:base\.)?(u|w|halting)(?:\.|$)")


def depths(model: nn.Module) -> dict[str, int]:
    """The depth of every parameter by name, that of the lowest layer it feeds: 0 for the embedding, 1 for the first
    layer and for what all layers share, and one more than the last layer for everything else, such as the classifier
    of a task."""
    names = [name for name, _ in model.named_parameters()]
    found = {name: int(match[1]) + 1 for name in names if (match := _LAYER.search(name))}
    above = max(found.values(), default=0) + 1
    for name in names:
        if name not in found:
            found[name] = 0 if _INPUT.search(name) else 1 if _SHARED.search(name) else above
    return found


def rate_factors(model: nn.Module, decay: float, embedding: float = 1.0) -> dict[str, float]:
    """decay^k for a parameter k layers below the top: the paper's 2.6 is a decay of 1 / 2.6. That of the embedding is
    multiplied by `embedding`."""
    found = depths(model)
    top = max(found.values(), default=0)
    return {name: decay ** (top - depth) * (1.0 if depth else embedding) for name, depth in found.items()}


def unfreeze(model: nn.Module, every: int | float, step: int, done: float) -> None:
    """Gradual unfreezing: train the last layer first, and one more each time `every` steps have passed. If `every` is
    below 1, it is a fraction of the run. The others get no gradient, so their weights do not change."""
    found, more = depths(model), step // every if every >= 1 else int(done / every + 1e-9)
    lowest = max(found.values(), default=0) - more
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(found[name] >= lowest)
