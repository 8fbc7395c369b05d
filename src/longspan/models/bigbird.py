"""BigBird (Zaheer et al. 2020): random, window and global blocks. docs/bigbird.md

Positions are in blocks of b. Block i sees the blocks

    window    i - floor(w/2), ..., i + floor(w/2)       (causal: i - w + 1, ..., i)
    global    0, ..., g - 1; and the blocks 0, ..., g - 1 see every block
    random    r of the others, drawn once for each layer and head

If causal, no query sees a later key.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from longspan.kernels.block_attention import Chunks, Columns, Graph, Part, Pattern, Rows
from longspan.nn.learned_positions import LearnedPositions
from longspan.nn.patterns import CausalOption, PatternLayer, farthest, head_type
from longspan.nn.transformer import TransformerConfig, initialise, require, resolve_max_distance
from longspan.nn.window_transformer import WindowTransformer
from longspan.reading import Reading

MOST_DRAWS = 2**20
"""Random blocks are drawn one by one when a model is built."""


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
            f"model.window_blocks={self.window_blocks} must be odd, because the window is symmetric; "
            f"use {self.window_blocks + 1}",
        )
        resolve_max_distance(self, True, 127)
        draws = self.layers * self.heads * -(-self.positions // self.block) * self.random_blocks
        require(
            draws <= MOST_DRAWS,
            f"model.random_blocks={self.random_blocks} means {draws} random draws over all blocks, heads and layers, "
            f"and the limit is {MOST_DRAWS}; use fewer, or a larger model.block",
        )

    @property
    def positions(self) -> int:
        return (self.max_distance or 0) + 1

    def pattern(self, layer: int) -> Pattern:
        before, after = (self.window_blocks - 1, 0) if self.causal else (self.window_blocks // 2,) * 2
        parts: list[Part] = [Chunks(self.block, before, after)]
        if self.global_blocks:
            parts.append(Columns(0, self.global_blocks * self.block))
            if not self.causal:
                parts.append(Rows(self.global_blocks * self.block))
        count = -(-self.positions // self.block)
        table = np.stack([self.random(f"{layer}/{head}", count, before, after) for head in range(self.heads)])
        if (table >= 0).any():
            parts.append(Graph(self.block, table))
        return Pattern(tuple(parts), self.causal)

    def random(self, seed: str, count: int, before: int, after: int) -> NDArray[np.int64]:
        """r distinct blocks for each of `count` blocks, neither global nor in its window; -1 for none.

        If causal, blocks do not depend on the length of the text. `Random.random` is the same in all versions of
        Python.
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


class BigBird(CausalOption, WindowTransformer):  # type: ignore[override]
    Config: ClassVar[type] = BigBirdConfig

    def __init__(self, config: BigBirdConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.places = LearnedPositions(config.positions, config.width, key="max_distance")
        patterns = [config.pattern(n) for n in range(config.layers)]
        self.layers = nn.ModuleList(PatternLayer(config, [pattern] * config.heads) for pattern in patterns)
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding, kind=head_type(config.causal))
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    def reach(self, reading: Reading | None = None) -> int:
        return farthest(self.layers, min((reading or self.reading).segment, self.places.count))
