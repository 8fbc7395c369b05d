"""The decoder for models without memory: it recomputes a sliding window at every step."""

import torch

from longspan.cache import TokenWindow
from longspan.contract import Decoder, LanguageModel, State
from longspan.nn.memory_transformer import MemoryTransformer
from longspan.reading import Reading
from longspan.shapes import Float, Int, Tensor

_LOGITS_OF_THE_HEAD = (LanguageModel.forward, MemoryTransformer.forward)
"""Those that return the head's logits of the last hidden states; the second one if there is no pointer, which needs a
memory."""


class WindowDecoder(Decoder):
    """Keeps the last `reading.segment` tokens of every row."""

    def __init__(self, model: LanguageModel, state: State) -> None:
        self.model, self.reading = model, state.reading
        cache = state.caches[0] if state.caches else None
        empty = state.length.new_zeros(state.batch, 0)
        self.window = cache.tokens[..., 0] if isinstance(cache, TokenWindow) else empty

    def prefill(self, tokens: Int[Tensor, "B T"]) -> None:
        self.window = torch.cat([self.window, tokens], dim=1)[:, -self.reading.segment :]

    @torch.no_grad()
    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.prefill(tokens[:, None])
        return last_logits(self.model, self.window, self.reading)

    def state(self) -> State:
        rows, count = self.window.shape
        return State((TokenWindow(self.window[..., None]),), self.window.new_full((rows,), count), self.reading)


def last_logits(model: LanguageModel, window: Int[Tensor, "B W"], reading: Reading) -> Float[Tensor, "B V"]:
    """The logits after the last token of a window, read on its own."""
    empty = model.initial_state(len(window), reading, trainable=False)
    if type(model).forward not in _LOGITS_OF_THE_HEAD:
        return model(window, empty)[0][:, -1]
    # The same without the logits of earlier positions, which cost more than the layers for a large vocabulary.
    hidden, _ = model.hidden_states(window, empty)
    return model.head.logits(hidden[-1][:, -1:], reading.temperature)[:, -1]
