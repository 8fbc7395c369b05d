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

from longspan.contract import Decoder, LanguageModel, State, StreamDecoder
from longspan.layers.attention import Position, no_biases
from longspan.layers.positions import ShawDistances, SinusoidDistances, distance_sinusoid
from longspan.layers.transformer import TransformerConfig, TransformerLayer, initialise, require, settle_max_distance
from longspan.memory.forms import empty_memory, memory_form
from longspan.memory.ring import RingDecoder
from longspan.memory.segments import first_visible, keep_last, remaining, trim
from longspan.memory.window import WindowDecoder
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(TransformerConfig):
    memory: int = 128
    clamp: int = 0
    same_length: bool = False
    position: Literal["relative", "shaw"] = "relative"
    max_distance: int | None = None
    shared_biases: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.memory >= 0, f"model.memory={self.memory} must not be negative")
        require(self.clamp >= 0, f"model.clamp={self.clamp} must not be negative; 0 turns it off")
        require(
            self.memory > 0 or not self.same_length,
            "model.same_length gives every query model.memory keys, and model.memory=0 leaves it none; "
            "raise the memory or turn same_length off",
        )
        # A size of weights, so it is settled here: another memory at evaluation must not change it.
        settle_max_distance(self, self.position == "shaw", self.segment + self.memory - 1)

    @property
    def window(self) -> int | None:
        """With same_length a query sees distances 0..memory-1, itself included."""
        return self.memory if self.same_length else None


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


class TransformerXL(LanguageModel):
    Config: ClassVar[type] = TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(TransformerXLLayer(config) for _ in range(config.layers))
        if config.position == "relative" and config.shared_biases:
            self.u = nn.Parameter(torch.empty(config.heads, config.head_size))
            self.w = nn.Parameter(torch.empty(config.heads, config.head_size))
        # Neither the authors' code nor the port has a final norm in the pre-norm form; it is an option of ours.
        self.final_norm = nn.LayerNorm(config.width) if config.final_norm else nn.Identity()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    @property
    def reach(self) -> int:
        """Hops back from a segment's last position, one per layer, each to the oldest position it can see."""
        c, place = self.config, -1
        for _ in range(c.layers):
            place = place - (c.memory - 1) if c.same_length else place // c.segment * c.segment - c.memory
        return -1 - place

    @property
    def state_size(self) -> int:
        """Projected keys and values; hidden states are half of that where heads x head_width is the width."""
        return 2 * self.config.layers * self.config.memory * self.config.heads * self.config.head_size

    @property
    def has_memory(self) -> bool:
        return self.config.memory > 0

    def initial_state(self, batch: int, *, projected: bool | None = None) -> State:
        """Nothing read yet. Memory holds hidden states while training, since gradients reach Wk and Wv through them;
        with fixed weights it holds projected keys and values, which give the same numbers and are made once."""
        c, like = self.config, self.embedding.tables[0]
        projected = not self.training if projected is None else projected
        parts = empty_memory(like, batch, c.layers, c.width, c.heads, c.head_size, projected=projected)
        return State(torch.zeros(batch, dtype=torch.int64, device=like.device), parts)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        if state is None or "window" in state.parts:  # a window of tokens is a decoder's, and says nothing here
            state = self.initial_state(tokens.shape[0])
        state = trim(state, self.config.memory)
        state.require_rows(tokens.shape[0])
        read, (remembered, *_) = memory_form(state, self.config.layers)
        T, capacity = tokens.shape[1], self.config.memory
        first_key = first_visible(state.length, remembered, T, starts)
        position = self.positions(remembered + T)
        hidden = [self.dropout(self.embedding(tokens))]
        kept: dict[str, tuple[Tensor, ...]] = dict.fromkeys(state.parts, ())
        for n, layer in enumerate(self.layers):
            keys, values, memory = read(layer, hidden[-1], n)
            for name, positions, segment, axis in memory:
                kept[name] += (keep_last(positions, segment, capacity, axis),)
            hidden.append(layer(hidden[-1], keys, values, position(layer), self.config.window, first_key))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        return tuple(hidden), State(remaining(first_key, remembered, capacity), kept)

    def positions(self, keys: int) -> Callable[[Any], Position]:
        """(r, u, w) of a layer for that many keys; a clamp leaves out the distances beyond it."""
        known = min(keys, self.config.clamp + 1) if self.config.clamp else keys
        if self.config.position == "shaw":
            return lambda layer: no_biases(layer.distances(known))
        like = self.embedding.tables[0]

        made: dict[int, Tensor] = {}  # not functools.cache, which torch.compile cannot see through

        def R(count: int) -> Float[Tensor, "C E"]:
            if count not in made:
                made[count] = self.dropout(distance_sinusoid(count, self.config.width, like.device).to(like.dtype))
            return made[count]

        def of_layer(layer: TransformerXLLayer) -> Position:
            biases = self if self.config.shared_biases else layer
            return layer.distances(known, R), biases.u, biases.w

        return of_layer

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        """One token at a time on a ring of projected keys and values; without memory, on a window of tokens."""
        state = self.initial_state(batch, projected=True) if state is None else state
        if not self.has_memory:
            return WindowDecoder(self, state, self.config.segment)
        ages = set(state.length.tolist())
        if "keys" not in state.parts or len(ages) != 1:
            return StreamDecoder(self, state)
        return RingDecoder(self, state, ages.pop())
