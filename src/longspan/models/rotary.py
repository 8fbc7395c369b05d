"""A modern decoder: rotary positions, RMS pre-norm, SwiGLU, no biases. docs/rotary.md

    q_i <- rot(i) q_i    k_j <- rot(j) k_j    score(i, j) = q_i . k_j / sqrt(D), which depends on i - j only

With a memory, keys are cached before rotation and rotated by their index among the keys of the segment, so positions
stay small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from longspan.cache import SegmentMask
from longspan.contract import State
from longspan.nn.memory_transformer import MemoryConfig, MemoryTransformer
from longspan.nn.model_config import require
from longspan.nn.positions import Rotation, rotary_table
from longspan.nn.transformer import ConvolutionLayer, initialise
from longspan.reading import Reading
from longspan.shapes import Float, Tensor


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(MemoryConfig):
    norm: Literal["post", "pre"] = "pre"
    norm_type: Literal["layer", "rms"] = "rms"
    final_norm: bool = True
    activation: Literal["relu", "gelu", "squared-relu", "swish", "swiglu"] = "swiglu"
    biases: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.head_size % 2 == 0,
            f"model.head_width={self.head_size} is odd, but rotary positions need pairs of units; use an even "
            "width per head",
        )


class RotaryLayer(ConvolutionLayer):
    def attend(
        self, inputs: Float[Tensor, "B T E"], keys: Tensor, values: Tensor, mask: SegmentMask, position: Rotation
    ) -> Float[Tensor, "B T E"]:
        query = position.last(inputs.shape[1])(self.attention.queries(inputs))
        return self.attention.attend(query, position(keys), values, mask)


class Rotary(MemoryTransformer):
    Config: ClassVar[type] = RotaryConfig
    settings = MemoryTransformer.settings | {"pointer"}
    reading = Reading(memory=0)

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(RotaryLayer(config) for _ in range(config.layers))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.add_parts(config)
        initialise(self)

    def positions(self, state: State, mask: SegmentMask) -> tuple[Sequence[Any], tuple[Tensor, ...]]:  # noqa: ARG002
        rotation = Rotation(rotary_table(mask.keys, self.config.head_size, self.embedding.tables[0]))
        return [rotation] * len(self.layers), ()
