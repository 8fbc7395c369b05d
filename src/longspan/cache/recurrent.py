"""The caches of recurrent layers."""

from typing import NamedTuple

from longspan.shapes import Float, Tensor


class LSTMCache(NamedTuple):
    h: Float[Tensor, "B D"]
    c: Float[Tensor, "B D"]


class QRNNCache(NamedTuple):
    x: Float[Tensor, "B E"]
    """The last input, for a window of 2; empty for a window of 1."""
    c: Float[Tensor, "B D"]
    """The cell, in float32 or wider, because it sums over the complete stream."""
