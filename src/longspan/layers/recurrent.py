"""What every recurrent model of the house shares: embedding, a stack of layers that each carry a state, softmax."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longspan.contract import UNBOUNDED, LanguageModel, State
from longspan.errors import StateError
from longspan.layers.model_config import ModelConfig
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(ModelConfig):
    """The last layer is as wide as the embedding, so that the two can be tied; those below it may be wider."""

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

    def rough_parameters(self) -> int:
        """Four gates of inputs and outputs: enough to tell a model that cannot fit from one that can."""
        layers = sum(4 * (inputs + outputs) * outputs for inputs, outputs in self.widths)
        return layers + self.vocabulary * (self.embedding_width or self.width)


def wide(kind: torch.dtype) -> torch.dtype:
    """What a sum over many positions or units is kept in."""
    return torch.promote_types(kind, torch.float32)


class RecurrentLayer(nn.Module):
    """Reads a segment from what it carries: `parts` names that, `carried` gives its widths."""

    parts: tuple[str, ...]
    carried: tuple[int, ...]
    worth_compiling = True

    @staticmethod
    @abstractmethod
    def boundaries(starts: Bool[Tensor, "B T"]) -> Any:
        """Where documents begin, in the form the layer takes it: made once for all layers."""

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T E"], carried: tuple[Tensor, ...], boundaries: Any
    ) -> tuple[Float[Tensor, "B T D"], tuple[Tensor, ...]]: ...

    def initial(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(like.new_zeros(batch, width) for width in self.carried)


class RecurrentModel(LanguageModel):
    """x_0 = drop(embed(tokens)), then x_n = drop(layer_n(x_{n-1})).

    A row's state is what its layers carry, all zeros before the first token; it holds no positions, so its length
    stays 0.
    """

    def __init__(self, config: RecurrentConfig, layers: Sequence[RecurrentLayer]) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding(scaled=False)
        self.layers: Any = nn.ModuleList(layers)
        self.head = config.make_head(self.embedding)
        self.input_dropout: nn.Module = nn.Dropout(config.dropout)
        self.hidden_dropout: nn.Module = nn.Dropout(config.dropout)
        self.output_dropout: nn.Module = nn.Dropout(config.dropout)
        self.initialise()

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

    @property
    def reach(self) -> int:
        return UNBOUNDED

    @property
    def worth_compiling(self) -> bool:
        return self.layers[0].worth_compiling

    @property
    def state_size(self) -> int:
        return sum(sum(layer.carried) for layer in self.layers)

    def initial_state(self, batch: int) -> State:
        like = self.embedding.tables[0]
        return State(
            torch.zeros(batch, dtype=torch.int64, device=like.device),
            self._by_part([layer.initial(batch, like) for layer in self.layers]),
        )

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The embedding and every layer's output; those below the last are `inner` wide."""
        hidden, _, state = self.read(tokens, state, starts)
        return hidden, state

    def read(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "B T D"], State]:
        """The hidden states, the last layer's output before dropout, and the state."""
        state = self.initial_state(tokens.shape[0]) if state is None else state
        self._require_fit(state, tokens.shape[0])
        boundaries = None if starts is None else self.layers[0].boundaries(starts)
        hidden, carried = [self.input_dropout(self.embed(tokens))], []
        for n, layer in enumerate(self.layers):
            before = tuple(state.parts[part][n] for part in layer.parts)
            output, after = layer(hidden[-1], before, boundaries)
            carried.append(tuple(tensor.detach() for tensor in after))
            drop = self.output_dropout if n == len(self.layers) - 1 else self.hidden_dropout
            hidden.append(drop(output))
        return tuple(hidden), output, State(state.length, self._by_part(carried), state.version)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return self.embedding(tokens)

    def _by_part(self, of_layers: Sequence[tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
        return dict(zip(self.layers[0].parts, zip(*of_layers, strict=True), strict=True))

    def _require_fit(self, state: State, rows: int) -> None:
        state.require_rows(rows)
        needed, counts = self.layers[0].parts, {len(part) for part in state.parts.values()}
        if set(state.parts) != set(needed) or counts != {len(self.layers)}:
            raise StateError(
                f"this state holds {sorted(state.parts)} of {sorted(counts)} layers; "
                f"this model of {len(self.layers)} layers needs {' and '.join(map(repr, needed))}"
            )
