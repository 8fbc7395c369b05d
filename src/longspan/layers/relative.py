"""Positions told by distance, as Transformer-XL tells them: what it shares with its relatives."""

from collections.abc import Callable
from typing import Any

from torch import nn

from longspan.layers.positions import SinusoidDistances, distance_sinusoid
from longspan.layers.transformer import TransformerConfig, TransformerLayer
from longspan.shapes import Float, Tensor


class RelativeLayer(TransformerLayer):
    """A layer with a key r = Wr R for every distance; u and w are the model's, shared by all layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.distances = SinusoidDistances(config.width, config.heads, config.head_size)


def dropped_sinusoids(model: Any, dropout: nn.Module) -> Callable[[int], Float[Tensor, "C E"]]:
    """R of as many distances as asked for, dropped; made once per count, for one call of the model."""
    like = model.embedding.tables[0]
    made: dict[int, Tensor] = {}  # not functools.cache, which torch.compile cannot see through

    def R(count: int) -> Float[Tensor, "C E"]:
        if count not in made:
            made[count] = dropout(distance_sinusoid(count, model.config.width, like.device).to(like.dtype))
        return made[count]

    return R
