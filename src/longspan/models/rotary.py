"""Today's plain decoder: rotary positions, RMS norm before each part, no biases. docs/rotary.md

    q_i <- rot(i) q_i    k_j <- rot(j) k_j    score(i, j) = q_i . k_j / sqrt(D), which depends on i - j alone

With the memory of Transformer-XL, keys are remembered as they were before rotation and turned by their place among the
keys of each segment, so no place ever grows large.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from longspan.layers.model_config import require
from longspan.layers.positions import Rotation, rotary_table
from longspan.layers.transformer import RememberingConfig, TransformerLayer, initialise
from longspan.memory.remembering import Remembering
from longspan.shapes import Float, Tensor


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(RememberingConfig):
    norm: Literal["post", "pre"] = "pre"
    norm_type: Literal["layer", "rms"] = "rms"
    final_norm: bool = True
    activation: Literal["relu", "gelu", "squared-relu", "swish", "swiglu"] = "swiglu"
    biases: bool = False
    memory: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.head_size % 2 == 0,
            f"model.head_width={self.head_size} is odd and rotation takes pairs; choose an even width per head",
        )


class RotaryLayer(TransformerLayer):
    """A layer whose queries and keys are turned by their places before they meet."""

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        position: Rotation,
        window: int | None,
        first_key: Tensor | None,
    ) -> Float[Tensor, "B T E"]:
        place = position.last(query.shape[2])
        return self.attention.attend(place(query), position(keys), values, None, window, first_key)


class Rotary(Remembering):
    Config: ClassVar[type] = RotaryConfig

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(RotaryLayer(config) for _ in range(config.layers))
        self.convolutions = config.make_convolutions()
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.copying = config.make_copying()
        self.regularise(config)
        initialise(self)

    def positions(self, keys: int) -> Callable[[Any], Rotation]:
        like = self.embedding.tables[0]
        table = rotary_table(keys, self.config.head_size, like.device).to(like.dtype)
        return lambda _: Rotation(table)
