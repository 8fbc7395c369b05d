"""The Sparse Transformer (Child et al. 2019): attention factorised into two steps of about sqrt(L) keys. docs/sparse.md

With stride l and c summary positions, query i sees the keys j <= i in

    strided   A1 = {i - l, ..., i}                       A2 = {j : (i - j) mod l = 0}
    fixed     A1 = {j : floor(j / l) = floor(i / l)}     A2 = {j : j mod l in {l - c, ..., l - 1}}
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from longspan.kernels.block_attention import Chunks, Columns, Part, Pattern, Window
from longspan.nn.learned_positions import LearnedPositions
from longspan.nn.patterns import PatternLayer, farthest
from longspan.nn.transformer import TransformerConfig, initialise, require, resolve_max_distance
from longspan.nn.window_transformer import WindowTransformer
from longspan.reading import Reading


@dataclass(frozen=True, kw_only=True)
class SparseConfig(TransformerConfig):
    """`factorised`: half of the heads use A1 and half A2, or layers alternate, or every head uses the union."""

    pattern: Literal["strided", "fixed"] = "strided"
    factorised: Literal["heads", "layers", "merged"] = "heads"
    stride: int = 16
    summary: int = 4
    max_distance: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.stride >= 1,
            f"model.stride={self.stride} must be at least 1; sqrt(segment) is cheapest",
        )
        require(
            1 <= self.summary <= self.stride,
            f"model.summary={self.summary} must be at most model.stride={self.stride} and at least 1; "
            f"use 1 to {self.stride}, or a longer stride",
        )
        for name in ("heads", "layers"):
            require(
                self.factorised != name or getattr(self, name) >= 2,
                f"model.factorised='{name}' needs at least 2 {name}; use model.{name}=2 or model.factorised='merged'",
            )
        resolve_max_distance(self, True, 127)

    def patterns(self) -> list[list[Pattern]]:
        """The pattern of every head of every layer."""
        steps = (self.local, self.distant)
        if self.factorised == "merged":
            return [[Pattern(steps)] * self.heads] * self.layers
        local, distant = (Pattern((step,)) for step in steps)
        if self.factorised == "layers":
            return [[distant if n % 2 else local] * self.heads for n in range(self.layers)]
        near = -(-self.heads // 2)
        return [[local] * near + [distant] * (self.heads - near)] * self.layers

    @property
    def local(self) -> Part:
        """A1."""
        return Window(self.stride) if self.pattern == "strided" else Chunks(self.stride)

    @property
    def distant(self) -> Part:
        """A2."""
        if self.pattern == "strided":
            return Window(step=self.stride)
        return Columns(self.stride - self.summary, self.stride, self.stride)


class Sparse(WindowTransformer):
    Config: ClassVar[type] = SparseConfig

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.places = LearnedPositions((config.max_distance or 0) + 1, config.width, config.stride, key="max_distance")
        self.layers = nn.ModuleList(PatternLayer(config, heads) for heads in config.patterns())
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    def reach(self, reading: Reading | None = None) -> int:
        return farthest(self.layers, min((reading or self.reading).segment, self.places.count))
