"""The cache of a decoder for models without memory."""

from typing import NamedTuple

from longspan.shapes import Int, Tensor


class TokenWindow(NamedTuple):
    """The last tokens of a stream, which the model reads again at every step."""

    tokens: Int[Tensor, "B W 1"]

    @property
    def positions(self) -> int:
        return self.tokens.shape[1]
