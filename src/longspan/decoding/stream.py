"""The decoder for every family: calls the model with one token."""

import torch

from longspan.contract import Decoder, LanguageModel, State
from longspan.segments import read_segments
from longspan.shapes import Float, Int, Tensor


class StreamDecoder(Decoder):
    """Shapes are constant once the caches are full. On a GPU the state then stays in fixed buffers, so that a CUDA
    graph can capture the step."""

    def __init__(self, model: LanguageModel, state: State) -> None:
        self.model, self._state = model, state
        self.capturable = model.hints.graph_safe and next(model.parameters()).is_cuda

    @torch.no_grad()
    def prefill(self, tokens: Int[Tensor, "B T"]) -> None:
        self.static = False
        self._state = read_segments(self.model, tokens, self.state())

    @torch.no_grad()
    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits, after = self.model(tokens[:, None], self._state)
        if self.static:
            for buffer, new in zip(self.buffers(), after.tensors().values(), strict=True):
                buffer.copy_(new)
            return logits[:, -1]
        if self.capturable and after.full and _shapes(after) == _shapes(self._state):
            self.static, after = True, after.map(torch.clone)
        self._state = after
        return logits[:, -1]

    def state(self) -> State:
        return self._state.map(torch.clone) if self.static else self._state

    def buffers(self) -> list[Tensor]:
        return list(self._state.tensors().values())


def _shapes(state: State) -> list[torch.Size]:
    return [tensor.shape for tensor in state.tensors().values()]
