"""The Transformer decoder without memory: every segment is read as if it were the first. docs/vanilla.md"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from longspan.contract import Decoder, LanguageModel, State
from longspan.errors import ConfigError
from longspan.layers.attention import no_biases
from longspan.layers.positions import ShawDistances, place_in_document, place_sinusoid
from longspan.layers.transformer import TransformerConfig, TransformerLayer, initialise, settle_max_distance
from longspan.memory.segments import first_visible
from longspan.memory.window import WindowDecoder
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class VanillaConfig(TransformerConfig):
    """Positions: `sinusoid` added once (Vaswani et al. 2017), `learned` added at every layer (Al-Rfou et al. 2018),
    or `shaw`, a learned vector per distance inside the attention (Shaw et al. 2018). `max_distance` is the last place
    or distance that has a vector of its own."""

    position: Literal["sinusoid", "learned", "shaw"] = "sinusoid"
    max_distance: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settle_max_distance(self, self.position != "sinusoid", self.segment - 1)


class VanillaLayer(TransformerLayer):
    """A layer that makes its keys of the segment alone."""

    def __init__(self, config: VanillaConfig) -> None:
        super().__init__(config)
        if config.position == "learned":
            self.places = nn.Parameter(torch.empty((config.max_distance or 0) + 1, config.width))
        if config.position == "shaw":
            self.distances = ShawDistances(config.heads, config.head_size, config.max_distance or 0)

    def forward(  # type: ignore[override]
        self, h: Float[Tensor, "B T D"], first_key: Int[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T D"]:
        if hasattr(self, "places"):
            h = h + self.places[place_in_document(first_key, h.shape[1], h.device)]
        position = no_biases(self.distances(h.shape[1])) if hasattr(self, "distances") else None
        return super().forward(h, *self.keys_values(h), position, None, first_key)


class Vanilla(LanguageModel):
    Config: ClassVar[type] = VanillaConfig

    def __init__(self, config: VanillaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(VanillaLayer(config) for _ in range(config.layers))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    @property
    def reach(self) -> int:
        return self.config.segment - 1

    @property
    def has_memory(self) -> bool:
        return False

    def initial_state(self, batch: int) -> State:
        return State(torch.zeros(batch, dtype=torch.int64, device=self.embedding.tables[0].device))

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        B, T = tokens.shape
        state = self.initial_state(B) if state is None else state
        state.require_rows(B)
        if self.config.position == "learned" and (known := self.config.max_distance + 1) < T:
            raise ConfigError(
                f"this model has learned {known} positions and was handed {T} tokens at once; "
                f"use segments of at most {known}"
            )
        first_key = None if starts is None else first_visible(state.length, 0, T, starts)
        h = self.embedding(tokens)
        if self.config.position == "sinusoid":
            h = h + place_sinusoid(place_in_document(first_key, T, tokens.device), self.config.width).to(h.dtype)
        hidden = [self.dropout(h)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], first_key))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        return tuple(hidden), state

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        return WindowDecoder(self, self.initial_state(batch) if state is None else state, self.config.segment)
