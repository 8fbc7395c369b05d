"""One token at a time without memory: the last tokens are read anew at every step."""

from typing import Any

import torch

from longspan.contract import Decoder, LanguageModel, State, require_tokens
from longspan.memory.segments import first_visible
from longspan.shapes import Bool, Float, Int, Tensor


class WindowDecoder:
    """Keeps the last `size` tokens of every row. Its state holds them as the part `window`."""

    def __init__(self, model: LanguageModel, state: State, size: int) -> None:
        self.model, self.size = model, size
        kept = state.parts.get("window")
        self.window = kept[0] if kept else state.length.new_zeros(state.batch, 0)

    def read(self, tokens: Int[Tensor, "B T"]) -> None:
        self.window = torch.cat([self.window, tokens], dim=1)[:, -self.size :]

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.read(tokens[:, None])
        hidden, _ = self.model.hidden_states(self.window)
        return self.model.head.logits(hidden[-1][:, -1:])[:, -1]

    def state(self) -> State:
        rows, kept = self.window.shape
        return State(self.window.new_full((rows,), kept), {"window": (self.window,)})


def window_form(model: LanguageModel) -> State:
    """The form of a WindowDecoder's state."""
    length = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
    return State(length, {"window": (length.new_zeros(1, 0),)})


def window_room(state: State, vocabulary: int) -> int:
    """The tokens of a window, every one of them known; none where the state has no window."""
    window = state.parts["window"][0] if "window" in state.parts else state.length[:, None][:, :0]
    require_tokens("window", window, vocabulary - 1)
    return window.shape[1]


class WithoutMemory(LanguageModel):
    """A family that reads every segment as if it were the first: its state is empty, its decoder a window of tokens."""

    embedding: Any
    layers: Any
    final_norm: Any
    dropout: Any

    @property
    def has_memory(self) -> bool:
        return False

    @property
    def reach(self) -> int:
        return self.config.segment - 1

    def initial_state(self, batch: int) -> State:
        return State(torch.zeros(batch, dtype=torch.int64, device=next(self.parameters()).device))

    def state_forms(self) -> list[State]:
        return [self.initial_state(1), window_form(self)]

    def room(self, state: State) -> int:
        return window_room(state, self.config.vocabulary)

    def begin(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[State, Int[Tensor, "B T"] | None]:
        """The state, and the oldest place each token may see; None where that is the segment's first for all."""
        B, T = tokens.shape
        state = self.initial_state(B) if state is None else state
        state.require_rows(B)
        return state, None if starts is None else first_visible(torch.zeros_like(state.length), 0, T, starts)

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        return WindowDecoder(self, self.initial_state(batch) if state is None else state, self.config.segment)


class Placed(WithoutMemory):
    """Vectors of `places` are added to the embedding, and each layer makes its keys of the segment alone."""

    places: Any

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        state, first_key = self.begin(tokens, state, starts)
        hidden = [self.dropout(self.embedding(tokens) + self.places(tokens.shape[1], first_key))]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], *layer.keys_values(hidden[-1]), first_key))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        return tuple(hidden), state
