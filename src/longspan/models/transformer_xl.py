"""Transformer-XL (Dai et al. 2019): segment-level recurrence and relative positions. docs/transformer_xl.md

For layer n and a memory m of the last M hidden states of layer n-1:

    h~ = [stop_gradient(m) ; h]          q = h Wq   k = h~ Wk   v = h~ Wv
    score(i, j) = (q_i + u) . k_j  +  (q_i + w) . (Wr R_{i-j})      all / sqrt(d_head)
                   (a) + (c)             (b) + (d)

The paper writes v for our w, and applies Wr as W_{k,R}.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from longspan.contract import Decoder, State
from longspan.layers.attention import Position, no_biases
from longspan.layers.model_config import require
from longspan.layers.positions import ShawDistances, SinusoidDistances
from longspan.layers.relative import dropped_sinusoids
from longspan.layers.transformer import RememberingConfig, TransformerLayer, initialise, settle_max_distance
from longspan.memory.recorded import RecordedDecoder, can_record
from longspan.memory.remembering import Remembering
from longspan.memory.ring import RingDecoder


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(RememberingConfig):
    clamp: int = 0
    position: Literal["relative", "shaw"] = "relative"
    max_distance: int | None = None
    shared_biases: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.clamp >= 0, f"model.clamp={self.clamp} must not be negative; 0 turns it off")
        # A size of weights, so it is settled here: another memory at evaluation must not change it.
        settle_max_distance(self, self.position == "shaw", self.segment + self.memory - 1)

    def rough_parameters(self) -> int:
        return super().rough_parameters() + self.layers * self.heads * self.head_size * (self.max_distance or 0)


class TransformerXLLayer(TransformerLayer):
    """A layer whose keys may reach into memory, told apart by distance."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        heads, size = config.heads, config.head_size
        if config.position == "shaw":
            self.distances: nn.Module = ShawDistances(heads, size, config.max_distance or 0)
        else:
            self.distances = SinusoidDistances(config.width, heads, size)
            if not config.shared_biases:
                self.u = nn.Parameter(torch.empty(heads, size))
                self.w = nn.Parameter(torch.empty(heads, size))


class TransformerXL(Remembering):
    Config: ClassVar[type] = TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(TransformerXLLayer(config) for _ in range(config.layers))
        if config.position == "relative" and config.shared_biases:
            self.u = nn.Parameter(torch.empty(config.heads, config.head_size))
            self.w = nn.Parameter(torch.empty(config.heads, config.head_size))
        self.convolutions = config.make_convolutions()
        # Neither the authors' code nor the port has a final norm in the pre-norm form; it is an option of ours.
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.copying = config.make_copying()
        self.regularise(config)
        initialise(self)

    def positions(self, keys: int) -> Callable[[Any], Position]:
        """(r, u, w) of a layer for that many keys, without distances that nobody sees or that look like another."""
        c = self.config
        known = min(keys, c.window or keys, c.clamp + 1 if c.clamp else keys)
        if self.config.position == "shaw":
            return lambda layer: no_biases(layer.distances(known))
        R = dropped_sinusoids(self, self.input_dropout)

        def of_layer(layer: TransformerXLLayer) -> Position:
            biases = self if self.config.shared_biases else layer
            return layer.distances(known, R), biases.u, biases.w

        return of_layer

    def ring(self, state: State, age: int) -> Decoder:
        if self.training:  # what is dropped is the layers' business
            return super().ring(state, age)
        return RecordedDecoder(self, state, age) if can_record(self) else RingDecoder(self, state, age)
