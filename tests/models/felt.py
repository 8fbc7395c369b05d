"""Whose change is felt where: the truth about who sees whom that a whole model tells."""

from collections.abc import Callable
from typing import Any

import torch

from longspan.models.families import build


def wide(family: str, values: dict[str, Any]) -> Any:
    """A small model in float64 whose weights are drawn so wide that whatever is seen is felt."""
    small = {"vocabulary": 11, "layers": 1, "width": 8, "heads": 2, "inner": 8, "segment": 30, "dropout": 0.0}
    torch.manual_seed(5)
    model = build(family, small | values).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model


@torch.no_grad()
def felt(model: Any, T: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """[i, j]: whether another token at j moves the last layer's output at i."""
    tokens = torch.randint(11, (1, T), generator=torch.Generator().manual_seed(2))
    changed = tokens.expand(T, T).clone()
    changed.diagonal().add_(1).remainder_(11)
    begins = None if starts is None else starts.expand(T + 1, T)
    hidden, _ = model.hidden_states(torch.cat([tokens, changed]), None, begins)
    return ((hidden[-1][1:] - hidden[-1][:1]).abs().amax(-1) > 1e-13).T


def sets(sees: Callable[[int], set[int]], T: int) -> torch.Tensor:
    """The same from a set of keys for each query."""
    seen = torch.zeros(T, T, dtype=torch.bool)
    for i in range(T):
        seen[i, [i, *sees(i)]] = True  # a residual connection carries the position itself
    return seen


def hops(*layers: torch.Tensor) -> torch.Tensor:
    """Who is felt through several layers, the lowest first."""
    through = layers[0]
    for layer in layers[1:]:
        through = (layer.double() @ through.double()) > 0
    return through


def farthest(seen: torch.Tensor) -> int:
    """The largest distance at which a token is felt."""
    i, j = seen.nonzero().T
    return int((i - j).max())
