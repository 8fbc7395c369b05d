"""The position-wise feed-forward layer."""

from collections.abc import Callable

from torch import nn
from torch.nn import functional as F

from longspan.shapes import Float, Tensor


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "squared-relu": squared_relu,
    "swish": F.silu,
}


class FeedForward(nn.Module):
    """drop(W2 drop(act(W1 x + b1)) + b2)."""

    def __init__(self, width: int, inner: int, activation: str, dropout: float, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.name, self.activation = activation, ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.dropout(self.down(self.dropout(self.activation(self.up(x)))))


class GatedFeedForward(nn.Module):
    """drop(W2 drop(silu(Wg x) * W1 x)): SwiGLU, Shazeer 2020."""

    def __init__(self, width: int, inner: int, dropout: float, *, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.dropout(self.down(self.dropout(F.silu(self.gate(x)) * self.up(x))))
