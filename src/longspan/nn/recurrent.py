"""The model that recurrent families share: an embedding, layers with a cache each, and a softmax."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from longspan.cache import open_state
from longspan.contract import UNBOUNDED, LanguageModel, State
from longspan.hints import Hints
from longspan.nn.model_config import ModelConfig
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor
from longspan.tree import map_tensors


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(ModelConfig):
    """The last layer is as wide as the embedding, so that embedding and softmax can be tied; lower layers are `inner`
    wide (default: width)."""

    layers: int = 3
    inner: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_width("inner")

    @property
    def widths(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer."""
        outputs = [self.inner or self.width] * (self.layers - 1) + [self.width]
        return list(zip([self.width, *outputs], outputs, strict=False))


class RecurrentLayer(nn.Module):
    """`x, cache = layer(x, cache, starts)`."""

    Cache: ClassVar[type]
    compiles = True
    """Whether torch.compile makes the layer faster."""

    @abstractmethod
    def initial(self, batch: int, like: Tensor) -> Any:
        """The cache before the first token: all zeros."""

    @staticmethod
    def prepare(starts: Bool[Tensor, "B T"]) -> Any:
        """Document starts in the form that the layer needs; computed once for all layers."""
        return starts

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T E"], cache: Any, starts: Any) -> tuple[Float[Tensor, "B T D"], Any]: ...


class RecurrentModel(LanguageModel):
    """x_0 = drop(embed(tokens)), then x_n = drop(layer_n(x_{n-1})).

    Caches hold no positions, so the length of a row stays 0.
    """

    layers: Any

    def __init__(self, config: RecurrentConfig, layers: Sequence[RecurrentLayer]) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding(scaled=False)
        self.layers = nn.ModuleList(layers)
        self.head = config.make_head(self.embedding)
        self.input_dropout: nn.Module = nn.Dropout(config.dropout)
        self.hidden_dropout: nn.Module = nn.Dropout(config.dropout)
        self.output_dropout: nn.Module = nn.Dropout(config.dropout)
        self.initialise()

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(compile=self.layers[0].compiles)

    @torch.no_grad()
    def initialise(self) -> None:
        """U(-0.1, 0.1) for embedding and softmax, U(-1/sqrt(n), 1/sqrt(n)) for a layer of n units: Merity et al. 2017,
        section 5."""
        for part in (self.embedding, self.head):
            for name, parameter in part.named_parameters():
                if "bias" in name:
                    parameter.zero_()
                else:
                    parameter.uniform_(-0.1, 0.1)
        for layer, (_, units) in zip(self.layers, self.config.widths, strict=True):
            for parameter in layer.parameters():
                parameter.uniform_(-(units**-0.5), units**-0.5)

    def reach(self, reading: Reading | None = None) -> int:  # noqa: ARG002
        return UNBOUNDED

    def initial_state(
        self,
        batch: int = 1,
        reading: Reading | None = None,
        *,
        trainable: bool | None = None,  # noqa: ARG002 (there is one form)
        filled: bool = False,  # noqa: ARG002 (and one size)
    ) -> State:
        reading, like = reading or self.reading, self.embedding.tables[0]
        self.check_reading(reading)
        caches = tuple(layer.initial(batch, like) for layer in self.layers)
        return State(caches, torch.zeros(batch, dtype=torch.int64, device=like.device), reading)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The embedding and every layer's output; those below the last are `inner` wide."""
        hidden, _, state = self.run_layers(tokens, state, starts)
        return hidden, state

    def run_layers(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "B T D"], State]:
        """The hidden states, the last layer's output before dropout, and the state."""
        state = open_state(self, tokens, state, self.layers[0].Cache)
        prepared = None if starts is None else self.layers[0].prepare(starts)
        hidden, caches = [self.input_dropout(self.embed(tokens))], []
        for n, (layer, cache) in enumerate(zip(self.layers, state.caches, strict=True), start=1):
            output, cache = layer(hidden[-1], cache, prepared)
            caches.append(map_tensors(Tensor.detach, cache))
            drop = self.output_dropout if n == len(self.layers) else self.hidden_dropout
            hidden.append(drop(output))
        return tuple(hidden), output, replace(state, caches=tuple(caches))

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return self.embedding(tokens)
