"""Segment-level recurrence (Dai et al. 2019, section 3.2): every layer reads a memory of its earlier inputs.

    h~ = [stop_gradient(m) ; h]          q = h Wq   k = h~ Wk   v = h~ Wv

How a score tells positions is the family's business; what is remembered, in which form and for how long is here.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from longspan.contract import Decoder, LanguageModel, State, StreamDecoder
from longspan.memory.forms import empty_memory, require_memory, with_memory
from longspan.memory.segments import first_visible, remaining, trim
from longspan.memory.window import WindowDecoder
from longspan.shapes import Bool, Float, Int, Tensor


class Remembering(LanguageModel):
    """Layers over [memory; segment]. A family gives it its parts, and `positions`."""

    embedding: Any
    layers: nn.ModuleList
    final_norm: nn.Module
    recordable = True

    def regularise(self, config: Any) -> None:
        """Make what keeps it from learning a small text by heart: dropout at both ends, penalties on the output."""
        self.word_dropout, self.input_dropout, self.output_dropout = config.make_dropouts()
        self.penalty = config.make_penalty()

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
        """Nothing read yet: hidden states while training, projected keys and values with fixed weights."""
        projected = not self.training if projected is None else projected
        return empty_memory(self.config, self.embedding.tables[0], batch, projected=projected)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        hidden, state = self.read(tokens, state, starts)
        return (*hidden[:-1], self.output_dropout(hidden[-1])), state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        if self.penalty is None:
            return super().training_loss(tokens, targets, state, progress, starts)
        hidden, state = self.read(tokens, state, starts)
        dropped = self.output_dropout(hidden[-1])
        return self.penalty(self.head.losses(dropped, targets).mean(), dropped, hidden[-1], starts), state

    def read(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The hidden states, the last one before its dropout, and the state."""
        if state is None or "window" in state.parts:  # a window of tokens is a decoder's, and says nothing here
            state = self.initial_state(tokens.shape[0])
        require_memory(state, tokens.shape[0], self.config.layers)
        T, capacity = tokens.shape[1], self.config.memory
        state = trim(state, capacity)
        remembered = next(iter(state.parts.values()))[0].shape[-2]
        first_key = None if starts is None and state.whole else first_visible(state.length, remembered, T, starts)
        position = self.positions(remembered + T)
        hidden = [self.input_dropout(self.word_dropout(self.embedding(tokens), tokens))]
        kept: dict[str, tuple[Tensor, ...]] = dict.fromkeys(state.parts, ())
        for n, layer in enumerate(self.layers):
            memory = {name: part[n] for name, part in state.parts.items()}
            keys, values, memory = with_memory(layer, hidden[-1], memory, capacity)
            kept = {name: (*kept[name], part) for name, part in memory.items()}
            hidden.append(layer(hidden[-1], keys, values, position(layer), self.config.window, first_key))
        hidden[-1] = self.final_norm(hidden[-1])
        length = state.length + T if first_key is None else remaining(first_key, remembered, capacity)
        whole = starts is None and (state.whole or capacity <= T)
        return tuple(hidden), State(length.clamp(max=capacity), kept, whole=whole)

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
