"""BigBird (Zaheer et al. 2020): random, window and global blocks. docs/bigbird.md

Places lie in blocks of b. Block i sees the blocks

    window    i - floor(w/2), ..., i + floor(w/2)       (causal: i - w + 1, ..., i)
    global    0, ..., g - 1; and the blocks 0, ..., g - 1 see every block
    random    r of those left, drawn once for each layer and head

Where causal, nothing later than the query is seen through any of them.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from longspan.kernels.block_attention import Chunks, Columns, Graph, Part, Pattern, Rows
from longspan.layers.patterns import PatternLayer, TwoSidedOption, farthest
from longspan.layers.places import LearnedPlaces
from longspan.layers.transformer import TransformerConfig, initialise, require, settle_max_distance
from longspan.memory.window import Placed

# Drawn when a model is made, each in a step of Python.
MOST_DRAWS = 2**20


@dataclass(frozen=True, kw_only=True)
class BigBirdConfig(TransformerConfig):
    block: int = 16
    window_blocks: int = 3
    random_blocks: int = 3
    global_blocks: int = 2
    causal: bool = True
    max_distance: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("block", 1), ("window_blocks", 1), ("random_blocks", 0), ("global_blocks", 0)):
            require(getattr(self, name) >= least, f"model.{name}={getattr(self, name)} must be at least {least}")
        require(
            self.causal or self.window_blocks % 2 == 1,
            f"model.window_blocks={self.window_blocks} must be odd to lie evenly about a block; "
            f"use {self.window_blocks + 1}",
        )
        settle_max_distance(self, True, self.segment - 1)
        draws = self.layers * self.heads * -(-self.places // self.block) * self.random_blocks
        require(
            draws <= MOST_DRAWS,
            f"model.random_blocks={self.random_blocks} for every block, head and layer makes {draws} draws, beyond the "
            f"largest, {MOST_DRAWS}; use fewer, or a larger model.block",
        )

    def rough_parameters(self) -> int:
        return super().rough_parameters() + self.places * self.width

    @property
    def places(self) -> int:
        return (self.max_distance or 0) + 1

    def pattern(self, layer: int) -> Pattern:
        before, after = (self.window_blocks - 1, 0) if self.causal else (self.window_blocks // 2,) * 2
        parts: list[Part] = [Chunks(self.block, before, after)]
        if self.global_blocks:
            parts.append(Columns(0, self.global_blocks * self.block))
            if not self.causal:
                parts.append(Rows(self.global_blocks * self.block))
        count = -(-self.places // self.block)
        table = np.stack([self.random(f"{layer}/{head}", count, before, after) for head in range(self.heads)])
        if (table >= 0).any():
            parts.append(Graph(self.block, table))
        return Pattern(tuple(parts), self.causal)

    def random(self, seed: str, count: int, before: int, after: int) -> NDArray[np.int64]:
        """r distinct blocks for each of `count` blocks, among those neither global nor in its window; -1 for none.

        The same for a longer text where causal. Python promises the numbers of `Random.random` for all its versions.
        """
        draw, table = Random(seed).random, np.full((count, self.random_blocks), -1)
        for i in range(self.global_blocks if not self.causal else 0, count if self.random_blocks else 0):
            left = range(self.global_blocks, max(i - before, self.global_blocks))
            right = range(max(i + after + 1, self.global_blocks), count if not self.causal else 0)
            chosen: list[int] = []
            while len(chosen) < min(self.random_blocks, len(left) + len(right)):
                at = int(draw() * (len(left) + len(right)))
                block = left[at] if at < len(left) else right[at - len(left)]
                if block not in chosen:
                    chosen.append(block)
            table[i, : len(chosen)] = chosen
        return table


class BigBird(TwoSidedOption, Placed):
    Config: ClassVar[type] = BigBirdConfig

    def __init__(self, config: BigBirdConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.places = LearnedPlaces(config.places, config.width)
        patterns = [config.pattern(n) for n in range(config.layers)]
        self.layers = nn.ModuleList(PatternLayer(config, [pattern] * config.heads) for pattern in patterns)
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    @property
    def reach(self) -> int:
        return farthest(self.layers, min(self.config.segment, self.places.count))
