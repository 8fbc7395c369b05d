"""Segment-level recurrence (Dai et al. 2019, section 3.2): every layer reads a memory of its earlier inputs.

    h~ = [stop_gradient(m) ; h]          q = h Wq   k = h~ Wk   v = h~ Wv

How a score tells positions is the family's business; what is remembered, in which form and for how long is here.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from longspan.contract import Decoder, LanguageModel, State, StreamDecoder
from longspan.errors import StateError
from longspan.memory.segments import first_visible, keep_last, remaining, trim
from longspan.memory.window import WindowDecoder
from longspan.shapes import Bool, Int, Tensor


class Remembering(LanguageModel):
    """Layers over [memory; segment]. A family gives it its parts, and `positions`."""

    embedding: Any
    layers: nn.ModuleList
    final_norm: nn.Module
    dropout: nn.Module

    @abstractmethod
    def positions(self, keys: int) -> Callable[[Any], Any]:
        """What each layer needs to tell that many keys apart; called with the layer."""

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
        c, like = self.config, next(self.embedding.parameters())
        if not self.training if projected is None else projected:
            empty = like.new_zeros(batch, c.heads, 0, c.head_size)
            parts = {"keys": (empty,) * c.layers, "values": (empty,) * c.layers}
        else:
            parts = {"hidden": (like.new_zeros(batch, 0, c.width),) * c.layers}
        return State(torch.zeros(batch, dtype=torch.int64, device=like.device), parts)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        if state is None or "window" in state.parts:  # a window of tokens is a decoder's, and says nothing here
            state = self.initial_state(tokens.shape[0])
        state = trim(state, self.config.memory)
        read, remembered = self._memory_form(state, tokens.shape[0])
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

    def _memory_form(self, state: State, batch: int) -> tuple[Callable, int]:
        """How a layer's keys and values are made from the form of memory this state holds, and how much it holds."""
        state.require_rows(batch)
        names, counts = set(state.parts), {len(part) for part in state.parts.values()}
        if counts != {self.config.layers} or names not in ({"hidden"}, {"keys", "values"}):
            raise StateError(
                f"this state holds {sorted(names)} of {sorted(counts)} layers; "
                f"this model of {self.config.layers} layers needs 'hidden', or 'keys' and 'values'"
            )

        def from_hidden(layer: Any, h: Tensor, n: int) -> tuple:
            context = torch.cat([state.parts["hidden"][n].to(h.dtype), h], dim=1)
            return *layer.keys_values(context), [("hidden", context, h, 1)]

        def from_projected(layer: Any, h: Tensor, n: int) -> tuple:
            new_keys, new_values = layer.keys_values(h)
            keys = torch.cat([state.parts["keys"][n].to(new_keys.dtype), new_keys], dim=2)
            values = torch.cat([state.parts["values"][n].to(new_values.dtype), new_values], dim=2)
            return keys, values, [("keys", keys, new_keys, 2), ("values", values, new_values, 2)]

        if names == {"hidden"}:
            return from_hidden, state.parts["hidden"][0].shape[1]
        return from_projected, state.parts["keys"][0].shape[2]

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        """One token at a time: on a window of tokens where there is no memory, else on what `ring` offers."""
        state = self.initial_state(batch, projected=True) if state is None else state
        if not self.has_memory:
            return WindowDecoder(self, state, self.config.segment)
        ages = set(state.length.tolist())
        if "keys" not in state.parts or len(ages) != 1:
            return StreamDecoder(self, state)
        return self.ring(state, ages.pop())

    def ring(self, state: State, age: int) -> Decoder:  # noqa: ARG002 (for families whose keys may lie in any order)
        """The decoder for rows of one age."""
        return StreamDecoder(self, state)
