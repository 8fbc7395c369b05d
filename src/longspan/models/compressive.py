"""Compressive Transformer (Rae et al. 2019): what leaves the memory is compressed, not dropped. docs/compressive.md

As Transformer-XL, with keys of [compressed memory ; memory ; segment]. Once a segment was read, the oldest positions
beyond `memory` leave it, `rate` of them become one slot f_c(old) of the compressed memory, and of those slots the last
`compressed` are kept. f_c learns from the attention it must preserve and from nothing else:

    L_c = sum over layers of mean | attend(h, old) - attend(h, f_c(old)) |^2,  h, old, Wq, Wk, Wv held fixed
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from longspan.contract import UNBOUNDED, Decoder, LanguageModel, State, StreamDecoder
from longspan.errors import StateError
from longspan.kernels.relative_attention.reference import attention_weights
from longspan.layers.attention import Position
from longspan.layers.compression import COMPRESSIONS, Convolution, reconstruction_loss
from longspan.layers.model_config import require
from longspan.layers.relative import RelativeLayer, dropped_sinusoids
from longspan.layers.transformer import TransformerConfig, initialise
from longspan.memory.compressed import leaving, slots_after, whole_blocks
from longspan.memory.segments import first_visible, keep_last
from longspan.memory.window import WindowDecoder, window_form, window_room
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class CompressiveConfig(TransformerConfig):
    memory: int = 128
    compressed: int = 128
    rate: int = 4
    compression: Literal["mean", "max", "convolution", "dilated", "most-used"] = "convolution"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.memory >= 0, f"model.memory={self.memory} must not be negative")
        require(self.compressed >= 0, f"model.compressed={self.compressed} must not be negative; 0 turns it off")
        require(self.rate >= 1, f"model.rate={self.rate} must be at least 1")
        require(
            self.memory > 0 or self.compressed == 0,
            f"model.compressed={self.compressed} holds what leaves the memory, and model.memory=0 lets nothing in; "
            "raise the memory or set compressed to 0",
        )

    @property
    def capacity(self) -> int:
        """The most slots a row holds: fewer than `rate` positions may wait for their block to be full."""
        return self.memory + (self.compressed + self.rate - 1 if self.compressed else 0)

    def rough_parameters(self) -> int:
        learned = self.compression in ("convolution", "dilated") and self.compressed > 0
        return super().rough_parameters() + learned * self.layers * self.rate * self.width**2


class Compressive(LanguageModel):
    Config: ClassVar[type] = CompressiveConfig

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(RelativeLayer(config) for _ in range(config.layers))
        self.u = nn.Parameter(torch.empty(config.heads, config.head_size))
        self.w = nn.Parameter(torch.empty(config.heads, config.head_size))
        compression = COMPRESSIONS[config.compression]
        count = config.layers if config.compressed else 0
        self.compressors = nn.ModuleList(compression(config.width, config.rate) for _ in range(count))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)
        for compressor in self.compressors:
            if isinstance(compressor, Convolution):
                compressor.begin_as_mean()

    @property
    def reach(self) -> int:
        """Hops back from a segment's last position, one per layer, each to the first token of the oldest block.

        Where a segment is not whole blocks, memory begins at another place of a block in each of `rate` segments; the
        farthest of them counts. What was most used depends on the slots chosen before it, and so on: no bound.
        """
        c, farthest = self.config, 0
        if c.compressed and c.compression == "most-used":
            return UNBOUNDED
        rate = c.rate if c.compressed else 1
        for phase in range(rate):
            last = place = phase * c.segment - 1
            for _ in range(c.layers):
                begin = place // c.segment * c.segment
                place = (begin - c.memory) // rate * rate - rate * c.compressed
            farthest = max(farthest, last - place)
        return farthest

    @property
    def state_size(self) -> int:
        return self.config.layers * self.config.capacity * self.config.width

    @property
    def tokens_to_fill(self) -> int:
        c = self.config
        return c.memory + (c.rate * (c.compressed + 1) if c.compressed else 0)

    @property
    def has_memory(self) -> bool:
        return self.config.memory > 0

    def initial_state(self, batch: int) -> State:
        """Nothing read yet. Per layer `compressed` slots and the `hidden` states of the memory; `length` counts the
        valid ones of both together. Hidden states, also with fixed weights: what leaves the memory is compressed."""
        c, like = self.config, self.embedding.tables[0]
        empty = (like.new_zeros(batch, 0, c.width),) * c.layers
        return State(torch.zeros(batch, dtype=torch.int64, device=like.device), {"compressed": empty, "hidden": empty})

    def state_forms(self) -> list[State]:
        return [self.initial_state(1), window_form(self)]

    def room(self, state: State) -> int:
        if "window" in state.parts:
            return window_room(state, self.config.vocabulary)
        counts = {name: {tensor.shape[1] for tensor in part} for name, part in state.parts.items()}
        if any(len(of_layers) > 1 for of_layers in counts.values()):
            raise StateError(f"this state's layers hold {counts!s:.200} positions; they must agree")
        return sum(of_layers.pop() for of_layers in counts.values())

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        hidden, state, _ = self._read(tokens, state, starts)
        return hidden, state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Tensor = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean loss; in training also what teaches the compressors. Neither's gradient reaches the other's."""
        hidden, state, wrong = self._read(tokens, state, starts, learning=self.training)
        return self.head.losses(hidden[-1], targets).mean() + wrong, state

    def _read(
        self,
        tokens: Int[Tensor, "B T"],
        state: State | None,
        starts: Bool[Tensor, "B T"] | None,
        learning: bool = False,
    ) -> tuple[tuple[Tensor, ...], State, Float[Tensor, ""]]:
        c, (B, T) = self.config, tokens.shape
        state = self._checked(state, B)
        compressed, memory = state.parts["compressed"], state.parts["hidden"]
        remembered, positions = compressed[0].shape[1] + memory[0].shape[1], memory[0].shape[1] + T
        first_key = first_visible(state.length, remembered, T, starts)
        valid = remembered + T - first_key[:, -1]
        gone = leaving(positions, c.memory, c.rate if c.compressed else 1)
        made = torch.zeros_like(valid)
        if self.compressors:
            made = whole_blocks(valid, positions, gone, c.rate, chosen=c.compression == "most-used")
        R = dropped_sinusoids(self, self.dropout)
        hidden = [self.dropout(self.embedding(tokens))]
        kept: dict[str, tuple[Tensor, ...]] = {"compressed": (), "hidden": ()}
        wrong = hidden[0].new_zeros(())
        layers: Any = self.layers
        for n, layer in enumerate(layers):
            h = hidden[-1]
            recent = torch.cat([memory[n].to(h.dtype), h], dim=1)
            context = torch.cat([compressed[n].to(h.dtype), recent], dim=1)
            keys, values = layer.keys_values(context)
            position = (layer.distances(remembered + T, R), self.u, self.w)
            hidden.append(layer(h, keys, values, position, None, first_key))
            slots = compressed[n]
            if self.compressors and gone:
                old, compressor = recent.detach(), self.compressors[n]
                usage = (
                    self._usage(layer, h, keys, position, first_key, positions, gone) if compressor.chooses else None
                )
                new = compressor(old, gone, usage)
                if learning and any(True for _ in compressor.parameters()):
                    wrong = wrong + reconstruction_loss(
                        layer.attention, layer.attention_residual, h, old[:, :gone], new, made
                    )
                slots = torch.cat([slots.to(new.dtype), new.detach()], dim=1)[:, -c.compressed :]
            kept["compressed"] += (slots,)
            kept["hidden"] += (keep_last(recent, h, positions - gone, 1),)
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        length = slots_after(valid, positions, gone, made, c.compressed)
        return tuple(hidden), State(length, kept), wrong

    def _checked(self, state: State | None, batch: int) -> State:
        if state is None or "window" in state.parts:  # a window of tokens is a decoder's, and says nothing here
            return self.initial_state(batch)
        state.require_rows(batch)
        counts = {name: len(part) for name, part in state.parts.items()}
        if counts != dict.fromkeys(("compressed", "hidden"), self.config.layers):
            raise StateError(
                f"this state holds {counts or 'nothing'}; "
                f"this model of {self.config.layers} layers needs 'compressed' and 'hidden' of as many layers"
            )
        return state

    @staticmethod
    @torch.no_grad()
    def _usage(
        layer: Any,
        h: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        position: Position,
        first_key: Int[Tensor, "B T"],
        positions: int,
        gone: int,
    ) -> Float[Tensor, "B O"]:
        """The mean attention that this segment's queries and heads gave to each position that leaves; none of another
        document is ever chosen before one of this."""
        query = layer.attention.queries(layer.attention_residual.inputs(h))
        distance, u, w = (part.to(query.dtype) for part in position)
        weights = attention_weights(query, keys.to(query.dtype), distance, u, w, first_key=first_key)
        begin = keys.shape[2] - positions
        usage = weights[..., begin : begin + gone].mean(dim=(1, 2))
        place = torch.arange(begin, begin + gone, device=usage.device)
        return usage.masked_fill(place < first_key[:, -1:], -1.0)

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        state = self.initial_state(batch) if state is None else state
        return StreamDecoder(self, state) if self.has_memory else WindowDecoder(self, state, self.config.segment)
