"""Measures which tokens influence which outputs, by changing one token at a time."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support import build


def wide_model(family: str, values: dict[str, Any]) -> Any:
    """A small model in float64 with large weights, so that every visible token has a measurable influence."""
    small = {"vocabulary": 11, "layers": 1, "width": 8, "heads": 2, "inner": 8, "segment": 30, "dropout": 0.0}
    torch.manual_seed(5)
    model = build(family, small | values).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model


@torch.no_grad()
def influence(model: Any, T: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """[i, j]: whether another token at j changes the last layer's output at i."""
    tokens = torch.randint(11, (1, T), generator=torch.Generator().manual_seed(2))
    changed = tokens.expand(T, T).clone()
    changed.diagonal().add_(1).remainder_(11)
    all_starts = None if starts is None else starts.expand(T + 1, T)
    hidden, _ = model.hidden_states(torch.cat([tokens, changed]), None, all_starts)
    return ((hidden[-1][1:] - hidden[-1][:1]).abs().amax(-1) > 1e-13).T


def visibility(visible: Callable[[int], set[int]], T: int) -> torch.Tensor:
    """The same matrix from the set of keys that each query may attend to."""
    seen = torch.zeros(T, T, dtype=torch.bool)
    for i in range(T):
        seen[i, [i, *visible(i)]] = True  # the residual connection carries the position itself
    return seen


def compose(*layers: torch.Tensor) -> torch.Tensor:
    """The influence through several layers, the lowest first."""
    through = layers[0]
    for layer in layers[1:]:
        through = (layer.double() @ through.double()) > 0
    return through


def farthest(seen: torch.Tensor) -> int:
    """The largest distance with an influence."""
    i, j = seen.nonzero().T
    return int((i - j).max())
