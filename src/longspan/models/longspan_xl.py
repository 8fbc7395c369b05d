"""Our variant of Transformer-XL: the same memory and four-term score, with later ideas as named parts.
docs/longspan_xl.md

    part                    where                   from
    RMS norm, pre-norm      nn/transformer.py       Zhang & Sennrich 2019; Xiong et al. 2020
    query-key norm          nn/attention.py         Henry et al. 2020
    short convolution       nn/convolution.py       So et al. 2021; Allen-Zhu 2025
    squared ReLU            nn/feed_forward.py      So et al. 2021
    u and w per layer       here
    pointer                 nn/pointer.py           Grave et al. 2017; Merity et al. 2017
    regularisation          nn/dropout.py, nn/penalties.py   the authors' Penn Treebank code

With every part off and post-norm it computes what `transformer-xl` computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.contract import State
from longspan.nn.attention import RelativePosition, without_biases
from longspan.nn.memory_transformer import MemoryConfig, MemoryTransformer
from longspan.nn.model_config import require
from longspan.nn.positions import (
    PositionKeys,
    ShawDistances,
    distance_sinusoid,
    log_distance_sinusoid,
    reusable_tables,
)
from longspan.nn.transformer import ConvolutionLayer, initialise, resolve_max_distance
from longspan.shapes import Float, Tensor


@dataclass(frozen=True, kw_only=True)
class LongspanXLConfig(MemoryConfig):
    norm: Literal["post", "pre"] = "pre"
    norm_type: Literal["layer", "rms"] = "rms"
    final_norm: bool = True
    activation: Literal["relu", "gelu", "squared-relu", "swish", "swiglu"] = "squared-relu"
    biases: bool = False
    qk_norm: bool = True
    convolution: int = 3
    shared_biases: bool = False
    position: Literal["relative", "shaw"] = "relative"
    """`relative` is the four-term score; `shaw` a learned vector per distance (Shaw et al. 2018)."""
    max_distance: int | None = None
    """With `shaw`, the last distance with its own vector. Default: 255."""
    log_distances: bool = False
    """With `relative`: half of R are sinusoids of the logarithm of the distance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_max_distance(self, self.position == "shaw", 255)
        require(
            self.position == "relative" or not self.log_distances,
            f"model.log_distances=true needs model.position='relative', not {self.position!r}",
        )

    @property
    def far_discount(self) -> float:
        return 2.0 if self.position == "relative" else 0.0


Position = RelativePosition | Float[Tensor, "H C D"]
"""(r, u, w) of a layer, or r alone if the layer has its own u and w."""


class LongspanXLLayer(ConvolutionLayer):
    def __init__(self, config: LongspanXLConfig) -> None:
        super().__init__(config)
        heads, size = config.heads, config.head_size
        if config.position == "shaw":
            self.distances: nn.Module = ShawDistances(heads, size, config.max_distance or 0)
            return
        self.distances = PositionKeys(config.width, heads, size)
        if not config.shared_biases:
            self.u, self.w = (nn.Parameter(torch.empty(heads, size)) for _ in range(2))

    def attend(
        self, inputs: Float[Tensor, "B T E"], keys: Tensor, values: Tensor, mask: SegmentMask, position: Position
    ) -> Float[Tensor, "B T E"]:
        return super().attend(inputs, keys, values, mask, self.with_biases(position))

    def with_biases(self, position: Position) -> RelativePosition:
        """(r, u, w). Only the layer reads its own u and w, so that layers can be sharded one by one."""
        if isinstance(position, Tensor):
            return position, self.u, self.w
        return position


class LongspanXL(MemoryTransformer):
    Config: ClassVar[type] = LongspanXLConfig
    settings = MemoryTransformer.settings | {"clamp", "discount", "pointer"}

    def __init__(self, config: LongspanXLConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(LongspanXLLayer(config) for _ in range(config.layers))
        if config.position == "relative" and config.shared_biases:
            self.u, self.w = (nn.Parameter(torch.empty(config.heads, config.head_size)) for _ in range(2))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.add_parts(config)
        initialise(self)

    def positions(self, state: State, mask: SegmentMask) -> tuple[Sequence[Position], tuple[Tensor, ...]]:
        count = mask.distances(state.reading.clamp)
        if self.config.position == "shaw":
            return [without_biases(layer.distances(count)) for layer in self.layers], ()

        features = log_distance_sinusoid if self.config.log_distances else distance_sinusoid

        def R(count: int) -> Float[Tensor, "C E"]:
            return self.input_dropout(features(count, self.config.width, self.embedding.tables[0]))

        keys, shared = reusable_tables([n.distances for n in self.layers], [count] * len(self.layers), state, R)
        return [(r, self.u, self.w) for r in keys] if self.config.shared_biases else keys, shared
