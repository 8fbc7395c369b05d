"""Longformer (Beltagy et al. 2020): a window per layer, dilated per head, and a few global tokens. docs/longformer.md

With window w and dilation d, query i sees the keys j with

    causal      i - j in {0, d, 2d, ..., (w-1) d}             two-sided    |i - j| in {0, d, 2d, ..., floor(w/2) d}

and the global tokens, the first g of its document. A global token sees every key of its document (if causal, every
earlier one) through separate projections. Scores have the four terms of Transformer-XL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.contract import State
from longspan.errors import ConfigError
from longspan.hints import Hints
from longspan.kernels.block_attention import Columns, Distances, Part, Pattern, Rows, Window
from longspan.nn.attention import HeadNorm, split_heads
from longspan.nn.memory_transformer import MemoryTransformer
from longspan.nn.patterns import CausalOption, PatternLayer, farthest, head_type
from longspan.nn.positions import PositionKeys, sinusoid, weights_are_fixed
from longspan.nn.transformer import TransformerConfig, initialise, require
from longspan.reading import Reading
from longspan.shapes import Float, Tensor


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(TransformerConfig):
    """`window` is one number, or one per layer. `dilation` is one number, or lists of one number per head: one list for
    all layers, or one per layer."""

    window: int | tuple[int, ...] = 32
    dilation: int | tuple[tuple[int, ...], ...] = 1
    global_tokens: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given, most in (("window", self.window, 1), ("dilation", self.dilation, self.heads)):
            lists = (given,) if isinstance(given, int) else given
            require(
                len(lists) in (1, self.layers),
                f"model.{name} has {len(lists)} entries for {self.layers} layers; use 1 or {self.layers}",
            )
            for entry in lists:
                values = (entry,) if isinstance(entry, int) else entry
                require(
                    len(values) in (1, most),
                    f"model.{name} has {len(values)} numbers for {most} heads; use 1 or {most}",
                )
                require(min(values) >= 1, f"model.{name}={min(values)} must be at least 1")
        require(self.global_tokens >= 0, f"model.global_tokens={self.global_tokens} must not be negative")

    def window_of(self, layer: int) -> int:
        if isinstance(self.window, int):
            return self.window
        return self.window[layer if len(self.window) > 1 else 0]

    def dilations(self, layer: int) -> tuple[int, ...]:
        """One for each head."""
        if isinstance(self.dilation, int):
            return (self.dilation,) * self.heads
        heads = self.dilation[layer if len(self.dilation) > 1 else 0]
        return heads if len(heads) > 1 else heads * self.heads

    def span(self, layer: int) -> int:
        """The farthest distance a causal window reaches."""
        return (self.window_of(layer) - 1) * max(self.dilations(layer))

    def windows(self, layer: int) -> list[Window]:
        """The window of each head."""
        w = self.window_of(layer)
        before, after = (w - 1, 0) if self.causal else (w // 2, w // 2)
        return [Window(before, after, d) for d in self.dilations(layer)]


class LongformerLayer(PatternLayer):
    """A layer with windows; global tokens have separate queries, keys and values."""

    def __init__(self, config: LongformerConfig, layer: int) -> None:
        windows = config.windows(layer)
        first: tuple[Part, ...] = (Columns(0, config.global_tokens),) if config.global_tokens else ()
        patterns = {window: Pattern((window, *first), config.causal) for window in windows}
        super().__init__(config, [patterns[window] for window in windows])
        self.windows = [windows[heads.start] for heads, _ in self.groups]
        self.distances = PositionKeys(config.width, config.heads, config.head_size)
        self.global_tokens = config.global_tokens
        if config.global_tokens:
            self.rows = Pattern((Rows(config.global_tokens),), config.causal)
            size = config.heads * config.head_size
            self.global_query, self.global_key, self.global_value = (
                nn.Linear(config.width, size, bias=False) for _ in range(3)
            )
            self.global_query_norm, self.global_key_norm = (
                HeadNorm(config.heads, config.head_size) if config.qk_norm else nn.Identity() for _ in range(2)
            )

    def window_distances(self, device: torch.device) -> list[Float[Tensor, "C"]]:
        """The distances that each group of heads sees, in steps of its dilation."""
        return [
            torch.arange(window.before, -window.after - 1, -1, device=device, dtype=torch.float64) * window.step
            for window in self.windows
        ]

    def position(
        self, r: Float[Tensor, "H C D"], u: Float[Tensor, "H D"], w: Float[Tensor, "H D"]
    ) -> Sequence[Distances]:
        """The position terms of each group of heads; `r` has the distances of all groups, one after another."""
        made, begin = [], 0
        for (heads, _), window in zip(self.groups, self.windows, strict=True):
            end = begin + window.before + window.after + 1
            made.append(Distances(r[heads, begin:end], u[heads], w[heads], window.after, window.step))
            begin = end
        return made

    def attend(
        self,
        inputs: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        mask: SegmentMask,
        position: Sequence[Distances] | None,
    ) -> Float[Tensor, "B T E"]:
        if not self.global_tokens:
            return super().attend(inputs, keys, values, mask, position)
        query, patterns = self.attention.queries(inputs), [pattern for _, pattern in self.groups]
        local = self.by_groups(patterns, query, keys, values, mask.first_key, position)
        q, k = self.global_query_norm(self.global_query(inputs)), self.global_key_norm(self.global_key(inputs))
        q, k, v = (split_heads(x, query.shape[1]) for x in (q, k, self.global_value(inputs)))
        global_ = self.by_groups([self.rows] * len(self.groups), q, k, v, mask.first_key, position)
        position_ = torch.arange(query.shape[2], device=query.device)
        position_ = position_ if mask.first_key is None else position_ - mask.first_key[:, None]
        return self.attention.project(torch.where((position_ < self.global_tokens)[..., None], global_, local))


class Longformer(CausalOption, MemoryTransformer):  # type: ignore[override]
    """With any memory above 0, every layer caches exactly the positions that its windows reach; with 0, nothing."""

    Config: ClassVar[type] = LongformerConfig
    settings = frozenset({"segment", "memory", "temperature"})
    reading = Reading(memory=0)

    def __init__(self, config: LongformerConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(LongformerLayer(config, n) for n in range(config.layers))
        self.u, self.w = (nn.Parameter(torch.empty(config.heads, config.head_size)) for _ in range(2))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding, kind=head_type(config.causal))
        self.input_dropout = self.output_dropout = nn.Dropout(config.dropout)
        initialise(self)

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints()

    def check_reading(self, reading: Reading) -> None:
        super().check_reading(reading)
        if not reading.memory:
            return
        c = self.config
        if not c.causal:
            raise ConfigError(
                f"memory={reading.memory} needs model.causal=true; use memory 0 with a bidirectional model"
            )
        if c.global_tokens:
            raise ConfigError(
                f"memory={reading.memory} drops the first tokens, which model.global_tokens={c.global_tokens} needs; "
                "use memory 0"
            )
        if reading.memory < (needed := max(map(c.span, range(c.layers)))):
            raise ConfigError(
                f"memory={reading.memory} is shorter than the reach of the windows; use {needed}, or 0 for none"
            )

    def limits(self, reading: Reading) -> list[int]:
        return [self.config.span(n) if reading.memory else 0 for n in range(self.config.layers)]

    def has_memory(self, reading: Reading | None = None) -> bool:
        return (reading or self.reading).memory > 0

    def reach(self, reading: Reading | None = None) -> int:
        """With memory, the sum of the windows; without, the farthest position that windows reach in a segment."""
        reading = reading or self.reading
        return sum(self.limits(reading)) if reading.memory else farthest(self.layers, reading.segment)

    def positions(self, state: State, mask: SegmentMask) -> tuple[Sequence[Any], tuple[Tensor, ...]]:  # noqa: ARG002
        keys, fixed = state.shared, weights_are_fixed(state)
        if not keys or not fixed:
            like, width = self.embedding.tables[0], self.config.width
            distances = [torch.cat(layer.window_distances(like.device)) for layer in self.layers]
            R = [self.input_dropout(sinusoid(each, width).to(like.dtype)) for each in distances]
            keys = tuple(layer.distances(own) for layer, own in zip(self.layers, R, strict=True))
        position = [layer.position(r, self.u, self.w) for layer, r in zip(self.layers, keys, strict=True)]
        return position, keys if fixed else ()
