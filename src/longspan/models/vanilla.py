"""The Transformer decoder without memory: every segment is read on its own. docs/vanilla.md"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.contract import State
from longspan.errors import ConfigError
from longspan.hints import Hints
from longspan.nn.attention import without_biases
from longspan.nn.auxiliary_losses import AuxiliaryLosses
from longspan.nn.learned_positions import check_positions
from longspan.nn.model_config import require
from longspan.nn.positions import ShawDistances, position_in_document, position_sinusoid
from longspan.nn.transformer import ConvolutionConfig, TransformerLayer, initialise, resolve_max_distance
from longspan.nn.window_transformer import WindowModel
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class VanillaConfig(ConvolutionConfig):
    """Positions are `sinusoid`, added once (Vaswani et al. 2017); `learned`, added at every layer (Al-Rfou et al.
    2018); or `shaw`, a learned vector per distance in the attention (Shaw et al. 2018). `max_distance` is the last
    position or distance with its own vector (default: 127). In training, `layer_losses` adds predictions of every
    layer, and `targets` is the number of following tokens to predict (Al-Rfou et al. 2018)."""

    position: Literal["sinusoid", "learned", "shaw"] = "sinusoid"
    max_distance: int | None = None
    layer_losses: bool = False
    targets: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.targets >= 1, f"model.targets={self.targets} must be at least 1")
        resolve_max_distance(self, self.position != "sinusoid", 127)


class VanillaLayer(TransformerLayer):
    def __init__(self, config: VanillaConfig) -> None:
        super().__init__(config)
        self.convolution = config.make_convolution()
        known = (config.max_distance or 0) + 1
        self.places = nn.Parameter(torch.empty(known, config.width)) if config.position == "learned" else None
        self.distances = ShawDistances(config.heads, config.head_size, known - 1) if config.position == "shaw" else None

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B T D"],
        cache: None,  # noqa: ARG002 (the signature of all layers)
        mask: SegmentMask,
        position: None = None,  # noqa: ARG002
    ) -> tuple[Float[Tensor, "B T D"], None]:
        if self.convolution is not None:
            x, _ = self.convolution(x, None, mask)
        if self.places is not None:
            x = x + self.places[position_in_document(mask.first_key, mask.tokens, x.device)]
        r = None if self.distances is None else without_biases(self.distances(mask.tokens))
        return super().forward(x, None, mask, r)  # type: ignore[return-value]


class Vanilla(WindowModel):
    Config: ClassVar[type] = VanillaConfig
    layers: Any

    def __init__(self, config: VanillaConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(VanillaLayer(config) for _ in range(config.layers))
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
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(graph_safe=True)

    def check_reading(self, reading: Reading) -> None:
        super().check_reading(reading)
        if self.config.targets > reading.segment:
            raise ConfigError(
                f"model.targets={self.config.targets} is larger than the segment of {reading.segment} tokens; use "
                "fewer targets or longer segments"
            )
        if self.config.position == "learned":
            check_positions(self.config.max_distance + 1, reading.segment, "max_distance", of_reading=True)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        state, mask = self.begin(tokens, state, starts)
        if self.config.position == "learned":
            check_positions(self.config.max_distance + 1, mask.tokens, "max_distance")
        x = self.embedding(tokens)
        if self.config.position == "sinusoid":
            position = position_in_document(mask.first_key, mask.tokens, tokens.device)
            x = x + position_sinusoid(position, self.config.width).to(x.dtype)
        return self.run_layers(self.dropout(x), mask), state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        if self.auxiliary is None:
            return super().training_loss(tokens, targets, state, progress, starts)
        hidden, state = self.hidden_states(tokens, state, starts)
        hidden = tuple(layer[:, -targets.shape[1] :] for layer in hidden)
        loss = self.head.losses(hidden[-1], targets, state.reading.temperature).mean()
        return loss + self.auxiliary(hidden, targets, progress), state
