"""Compressive Transformer (Rae et al. 2019): positions that leave the memory are compressed. docs/compressive.md

As Transformer-XL, with keys of [compressed memory ; memory ; segment]. After a segment, the oldest positions beyond
`memory` leave it. Every `rate` of them become one slot f_c(old) of the compressed memory, which keeps the last
`compressed` slots. Only the attention-reconstruction loss trains f_c:

    L_c = sum over layers of mean | attend(h, old) - attend(h, f_c(old)) |^2,  with h, old, Wq, Wk, Wv detached
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from longspan.cache import SegmentMask, expanded_zeros, newest, open_state
from longspan.cache.compressed import CompressedCache, evicted_positions, slots_after, valid_slots
from longspan.contract import UNBOUNDED, LanguageModel, State
from longspan.errors import ConfigError
from longspan.hints import Hints
from longspan.kernels.relative_attention.reference import attention_weights
from longspan.nn.attention import RelativePosition
from longspan.nn.compression import COMPRESSIONS, Convolution, reconstruction_loss
from longspan.nn.model_config import require
from longspan.nn.positions import PositionKeys, distance_sinusoid
from longspan.nn.transformer import TransformerConfig, TransformerLayer, initialise
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class CompressiveConfig(TransformerConfig):
    compressed: int = 128
    """Compressed slots; 0 turns compression off."""
    rate: int = 4
    """Positions per slot."""
    compression: Literal["mean", "max", "convolution", "dilated", "most-used"] = "convolution"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.compressed >= 0, f"model.compressed={self.compressed} must not be negative; 0 turns it off")
        require(self.rate >= 1, f"model.rate={self.rate} must be at least 1")


class Eviction(NamedTuple):
    """What leaves the memory after a segment."""

    positions: int
    """Positions of memory and segment."""
    evicted: int
    """How many of the oldest leave."""
    new: Int[Tensor, "B"]
    """How many of the slots they are compressed to are valid, per row."""


class CompressiveLayer(TransformerLayer):
    """`x, cache, loss = layer(x, cache, mask, position, eviction)`. The loss trains only the compressor."""

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__(config)
        self.distances = PositionKeys(config.width, config.heads, config.head_size)
        self.slots = config.compressed
        compression = COMPRESSIONS[config.compression]
        self.compressor = compression(config.width, config.rate) if config.compressed else None

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B T E"],
        cache: CompressedCache,
        mask: SegmentMask,
        position: RelativePosition,
        eviction: Eviction,
    ) -> tuple[Float[Tensor, "B T E"], CompressedCache, Float[Tensor, ""] | None]:
        recent = torch.cat([cache.hidden.to(x.dtype), x], dim=1)
        keys, values = self.keys_values(torch.cat([cache.compressed.to(x.dtype), recent], dim=1))
        inputs = self.attention_residual.inputs(x)
        h = self.attention_residual(x, self.attend(inputs, keys, values, mask, position))
        h = self.feed_forward_residual(h, self.feed_forward(self.feed_forward_residual.inputs(h)))
        slots, loss = cache.compressed, None
        if self.compressor is not None and eviction.evicted:
            old = recent.detach()
            usage = self.usage(inputs, keys, mask, position, eviction) if self.compressor.selects else None
            new = self.compressor(old, eviction.evicted, usage)
            if self.training and any(True for _ in self.compressor.parameters()):
                left = old[:, : eviction.evicted]
                loss = reconstruction_loss(self.attention, self.attention_residual, x, left, new, eviction.new)
            slots = torch.cat([slots.to(new.dtype), new.detach()], dim=1)[:, -self.slots :]
        hidden = newest(recent.detach(), x.detach(), eviction.positions - eviction.evicted, dim=1)
        return h, CompressedCache(slots, hidden), loss

    @torch.no_grad()
    def usage(
        self,
        inputs: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        mask: SegmentMask,
        position: RelativePosition,
        eviction: Eviction,
    ) -> Float[Tensor, "B O"]:
        """The mean attention of this segment's queries and heads to each evicted position. Positions of other documents
        rank below all of the current one."""
        query = self.attention.queries(inputs)
        r, u, w = (part.to(query.dtype) for part in position)
        weights = attention_weights(query, keys.to(query.dtype), r, u, w, first_key=mask.first_key)
        begin = keys.shape[2] - eviction.positions
        usage = weights[..., begin : begin + eviction.evicted].mean(dim=(1, 2))
        position_index = torch.arange(begin, begin + eviction.evicted, device=usage.device)
        assert mask.first_key is not None
        return usage.masked_fill(position_index < mask.first_key[:, -1:], -1.0)


class Compressive(LanguageModel):
    Config: ClassVar[type] = CompressiveConfig
    settings = frozenset({"segment", "memory", "temperature"})
    layers: Any

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(CompressiveLayer(config) for _ in range(config.layers))
        self.u, self.w = (nn.Parameter(torch.empty(config.heads, config.head_size)) for _ in range(2))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)
        for layer in self.layers:
            if isinstance(layer.compressor, Convolution):
                layer.compressor.initialise_as_mean()

    def has_memory(self, reading: Reading | None = None) -> bool:
        return (reading or self.reading).memory > 0

    def check_reading(self, reading: Reading) -> None:
        super().check_reading(reading)
        if self.config.compressed and not reading.memory:
            raise ConfigError(
                f"memory=0 leaves nothing to compress into model.compressed={self.config.compressed} slots; "
                "use a memory above 0"
            )

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(shard_layers=False)  # the reconstruction loss uses weights of layers in its own backward pass

    def reach(self, reading: Reading | None = None) -> int:
        """One hop per layer, from a segment's last position back to the first token of the oldest block.

        If the segment is not a multiple of the rate, the memory starts at different offsets in a block in each of
        `rate` segments, and the farthest counts. With most-used compression a choice depends on earlier choices,
        without bound.
        """
        c, reading, farthest = self.config, reading or self.reading, 0
        if c.compressed and c.compression == "most-used":
            return UNBOUNDED
        rate = c.rate if c.compressed else 1
        for phase in range(rate):
            last = position = phase * reading.segment - 1
            for _ in range(c.layers):
                begin = position // reading.segment * reading.segment
                position = (begin - reading.memory) // rate * rate - rate * c.compressed
            farthest = max(farthest, last - position)
        return farthest

    def initial_state(
        self,
        batch: int = 1,
        reading: Reading | None = None,
        *,
        trainable: bool | None = None,  # noqa: ARG002 (hidden states in both cases)
        filled: bool = False,
    ) -> State:
        reading = reading or self.reading
        self.check_reading(reading)
        c, like = self.config, self.embedding.tables[0]
        # Up to rate - 1 positions more than `memory` wait until their block is complete.
        waiting = c.rate - 1 if c.compressed else 0
        slots = expanded_zeros(like, batch, c.compressed * filled, c.width)
        hidden = expanded_zeros(like, batch, (reading.memory + waiting) * filled, c.width)
        length = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return State((CompressedCache(slots, hidden),) * c.layers, length, reading)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        hidden, state, _ = self.run_layers(tokens, state, starts)
        return hidden, state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Tensor = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean loss, in training mode plus that of the compressors. Each loss trains its own weights only."""
        hidden, state, compression = self.run_layers(tokens, state, starts)
        return self.head.losses(hidden[-1], targets, state.reading.temperature).mean() + compression, state

    def run_layers(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], State, Float[Tensor, ""]]:
        c, T = self.config, tokens.shape[1]
        state = open_state(self, tokens, state, CompressedCache)
        slots, hidden_before = state.caches[0]
        mask = SegmentMask.of(state, slots.shape[1] + hidden_before.shape[1], T, starts)
        eviction, length = self.eviction(mask, hidden_before.shape[1] + T)
        x = self.dropout(self.embedding(tokens))
        R = self.dropout(distance_sinusoid(mask.keys, c.width, self.embedding.tables[0]))
        hidden, caches, losses = [x], [], []
        for layer, cache in zip(self.layers, state.caches, strict=True):
            x, cache, loss = layer(x, cache, mask, (layer.distances(R), self.u, self.w), eviction)
            hidden.append(x)
            caches.append(cache)
            losses += [] if loss is None else [loss]
        hidden[-1] = self.dropout(self.final_norm(x))
        total = sum(losses, x.new_zeros(()))
        return tuple(hidden), replace(state, caches=tuple(caches), length=length), total

    def eviction(self, mask: SegmentMask, positions: int) -> tuple[Eviction, Int[Tensor, "B"]]:
        """What leaves the memory after this segment, and the number of valid slots per row after it."""
        c = self.config
        assert mask.first_key is not None
        valid = mask.keys - mask.first_key[:, -1]
        evicted = evicted_positions(positions, mask.memory, c.rate if c.compressed else 1)
        new = torch.zeros_like(valid)
        if c.compressed:
            new = valid_slots(valid, positions, evicted, c.rate, selected=c.compression == "most-used")
        return Eviction(positions, evicted, new), slots_after(valid, positions, evicted, new, c.compressed)
