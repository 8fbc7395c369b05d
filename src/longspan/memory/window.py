"""One token at a time without memory: the last tokens are read anew at every step."""

import torch

from longspan.contract import LanguageModel, State
from longspan.shapes import Float, Int, Tensor


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
