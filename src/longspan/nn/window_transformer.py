"""Models without memory: every segment is read on its own."""

from typing import Any

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.cache.segment import first_keys, without_window
from longspan.contract import LanguageModel, State
from longspan.nn.embedding import AdaptiveEmbedding
from longspan.nn.learned_positions import LearnedPositions
from longspan.reading import Reading
from longspan.segments import check_rows
from longspan.shapes import Bool, Float, Int, Tensor


class WindowModel(LanguageModel):
    """A family whose state is empty. It is scored and decoded over a sliding window of tokens."""

    layers: Any
    final_norm: nn.Module
    dropout: nn.Module

    def has_memory(self, reading: Reading | None = None) -> bool:  # noqa: ARG002
        return False

    def reach(self, reading: Reading | None = None) -> int:
        return (reading or self.reading).segment - 1

    def initial_state(
        self,
        batch: int = 1,
        reading: Reading | None = None,
        *,
        trainable: bool | None = None,  # noqa: ARG002 (there are no caches)
        filled: bool = False,  # noqa: ARG002
    ) -> State:
        reading = reading or self.reading
        self.check_reading(reading)
        length = torch.zeros(batch, dtype=torch.int64, device=next(self.parameters()).device)
        return State((), length, reading)

    def begin(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[State, SegmentMask]:
        state = self.initial_state(tokens.shape[0]) if state is None else state
        check_rows(tokens, state.batch)
        state = without_window(self, state) if state.caches else state
        T = tokens.shape[1]
        first = None if starts is None else first_keys(torch.zeros_like(state.length), 0, T, starts)
        return state, SegmentMask(0, T, 0, None, first, starts)

    def run_layers(self, x: Float[Tensor, "B T E"], mask: SegmentMask) -> tuple[Float[Tensor, "B T E"], ...]:
        """The embedded input and every layer's output, the last one after the final norm and dropout."""
        hidden = [x]
        for layer in self.layers:
            x, _ = layer(x, None, mask)
            hidden.append(x)
        hidden[-1] = self.dropout(self.final_norm(x))
        return tuple(hidden)


class WindowTransformer(WindowModel):
    """Learned positions added to the embedding, then layers that attend to the segment only."""

    embedding: AdaptiveEmbedding
    places: LearnedPositions

    def check_reading(self, reading: Reading) -> None:
        super().check_reading(reading)
        self.places.check(reading.segment)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Float[Tensor, "B T E"], ...], State]:
        state, mask = self.begin(tokens, state, starts)
        x = self.dropout(self.embedding(tokens) + self.places(tokens.shape[1], mask.first_key))
        return self.run_layers(x, mask), state
