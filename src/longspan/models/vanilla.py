"""The Transformer decoder without memory: every segment is read as if it were the first. docs/vanilla.md"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from longspan.contract import State
from longspan.errors import ConfigError
from longspan.layers.attention import no_biases
from longspan.layers.auxiliary_losses import AuxiliaryLosses
from longspan.layers.model_config import require
from longspan.layers.positions import ShawDistances, place_in_document, place_sinusoid
from longspan.layers.transformer import ConvolvingConfig, TransformerLayer, initialise, settle_max_distance
from longspan.memory.tails import seen_taps
from longspan.memory.window import WithoutMemory
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class VanillaConfig(ConvolvingConfig):
    """Positions: `sinusoid` added once (Vaswani et al. 2017), `learned` added at every layer (Al-Rfou et al. 2018),
    or `shaw`, a learned vector per distance inside the attention (Shaw et al. 2018). `max_distance` is the last place
    or distance that has a vector of its own. While training, `layer_losses` has every layer predict, and `targets`
    is how many tokens ahead (Al-Rfou et al. 2018)."""

    position: Literal["sinusoid", "learned", "shaw"] = "sinusoid"
    max_distance: int | None = None
    layer_losses: bool = False
    targets: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            1 <= self.targets <= self.segment,
            f"model.targets={self.targets} must lie between 1 and the segment of {self.segment}",
        )
        settle_max_distance(self, self.position != "sinusoid", self.segment - 1)

    def rough_parameters(self) -> int:
        size = self.width if self.position == "learned" else self.heads * self.head_size
        return super().rough_parameters() + self.layers * size * (self.max_distance or 0)


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


class Vanilla(WithoutMemory):
    Config: ClassVar[type] = VanillaConfig

    def __init__(self, config: VanillaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(VanillaLayer(config) for _ in range(config.layers))
        self.convolutions = config.make_convolutions()
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.auxiliary = (
            AuxiliaryLosses(config, self.embedding, config.layer_losses, config.targets)
            if config.layer_losses or config.targets > 1
            else None
        )
        initialise(self)

    @property
    def recordable(self) -> bool:
        """With cutoffs the softmax has shapes that depend on the data."""
        return not self.config.cutoffs

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        T = tokens.shape[1]
        state, first_key = self.begin(tokens, state, starts)
        if self.config.position == "learned" and (known := self.config.max_distance + 1) < T:
            raise ConfigError(
                f"this model has learned {known} positions and was handed {T} tokens at once; "
                f"use segments of at most {known}"
            )
        h = self.embedding(tokens)
        if self.config.position == "sinusoid":
            h = h + place_sinusoid(place_in_document(first_key, T, tokens.device), self.config.width).to(h.dtype)
        hidden = [self.dropout(h)]
        seen = seen_taps(first_key, 0, self.config.convolution)
        for n, layer in enumerate(self.layers):
            if self.convolutions:
                hidden[-1] = self.convolutions[n](hidden[-1], seen=seen)
            hidden.append(layer(hidden[-1], first_key))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        return tuple(hidden), state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        if self.auxiliary is None:
            return super().training_loss(tokens, targets, state, progress, starts)
        hidden, state = self.hidden_states(tokens, state, starts)
        return self.head.losses(hidden[-1], targets).mean() + self.auxiliary(hidden, targets, progress), state
