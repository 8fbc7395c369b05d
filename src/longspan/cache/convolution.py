"""The cache of a layer with a short convolution."""

from typing import NamedTuple

from longspan.cache.attention import AttentionCache
from longspan.shapes import Float, Tensor


class ConvolutionCache(NamedTuple):
    """The cache of the attention, and the last N inputs of the layer before its convolution, detached. Inputs before
    the start of the row or document are zero. Without memory there are none."""

    attention: AttentionCache
    inputs: Float[Tensor, "B N E"]

    @property
    def positions(self) -> int:
        return self.attention.positions

    @property
    def trainable(self) -> bool:
        return self.attention.trainable

    def trim(self, limit: int) -> "ConvolutionCache":
        return ConvolutionCache(self.attention.trim(limit), self.inputs)
