"""Longformer (Beltagy et al. 2020): a window per layer, dilated per head, and a few global tokens. docs/longformer.md

With window w and dilation d, query i sees the keys j of

    causal      i - j in {0, d, 2d, ..., (w-1) d}             two-sided    |i - j| in {0, d, 2d, ..., floor(w/2) d}

and the global tokens, the first g of its document; a global token sees every key of its document (every earlier one
where causal), through projections of its own. Scores are Transformer-XL's four terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from longspan.contract import Decoder, State, StreamDecoder
from longspan.kernels.block_attention import Columns, Distances, Part, Pattern, Rows, Window
from longspan.layers.attention import HeadNorm, split_heads
from longspan.layers.patterns import PatternLayer, TwoSidedOption, farthest, require_causal
from longspan.layers.positions import SinusoidDistances, sinusoid
from longspan.layers.transformer import TransformerConfig, initialise, require
from longspan.memory.forms import empty_memory, held, require_memory, with_memory
from longspan.memory.segments import first_visible, remaining
from longspan.memory.window import WindowDecoder, window_form, window_room
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(TransformerConfig):
    """`window` is one number or one per layer; `dilation` one number, or a list of one number per head, one list for
    all layers or one per layer. `memory` is 0, or any number that holds the farthest distance a window reaches."""

    window: int | tuple[int, ...] = 32
    dilation: int | tuple[tuple[int, ...], ...] = 1
    global_tokens: int = 0
    causal: bool = True
    memory: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given, most in (("window", self.window, 1), ("dilation", self.dilation, self.heads)):
            lists = (given,) if isinstance(given, int) else given
            require(
                len(lists) in (1, self.layers),
                f"model.{name} has {len(lists)} entries for {self.layers} layers; give 1 or {self.layers}",
            )
            for entry in lists:
                values = (entry,) if isinstance(entry, int) else entry
                require(
                    len(values) in (1, most),
                    f"model.{name} has {len(values)} numbers for {most} heads; give 1 or {most}",
                )
                require(min(values) >= 1, f"model.{name}={min(values)} must be at least 1")
        require(self.global_tokens >= 0, f"model.global_tokens={self.global_tokens} must not be negative")
        require(self.memory >= 0, f"model.memory={self.memory} must not be negative; 0 turns it off")
        if self.memory:
            require(self.causal, "model.memory is of the past, and model.causal=false reads both ways; turn one off")
            require(
                self.global_tokens == 0,
                f"model.memory forgets the first tokens, and model.global_tokens={self.global_tokens} needs them; "
                "turn one off",
            )
            farthest = max(self.span(n) for n in range(self.layers))
            require(
                self.memory >= farthest,
                f"model.memory={self.memory} is shorter than the farthest distance its windows reach, {farthest}; "
                f"use {farthest}, or 0 for none",
            )

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
        """What each head sees around itself."""
        w = self.window_of(layer)
        before, after = (w - 1, 0) if self.causal else (w // 2, w // 2)
        return [Window(before, after, d) for d in self.dilations(layer)]


class LongformerLayer(PatternLayer):
    """A layer of windows; its global tokens have queries, keys and values of their own."""

    def __init__(self, config: LongformerConfig, layer: int) -> None:
        windows = config.windows(layer)
        first: tuple[Part, ...] = (Columns(0, config.global_tokens),) if config.global_tokens else ()
        patterns = {window: Pattern((window, *first), config.causal) for window in windows}
        super().__init__(config, [patterns[window] for window in windows])
        self.windows = [windows[heads.start] for heads, _ in self.groups]
        self.distances = SinusoidDistances(config.width, config.heads, config.head_size)
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

    def positions(self, u: Float[Tensor, "H D"], w: Float[Tensor, "H D"], dropout: nn.Module) -> Sequence[Distances]:
        """The position terms of each group of heads: distances in steps of its dilation."""
        steps = [
            torch.arange(window.before, -window.after - 1, -1, device=u.device, dtype=torch.float64) * window.step
            for window in self.windows
        ]
        places = torch.cat(steps)
        width = self.distances.projection.in_features
        r = self.distances(len(places), lambda _: dropout(sinusoid(places, width).to(u.dtype)))
        made, begin = [], 0
        for (heads, _), window, step in zip(self.groups, self.windows, steps, strict=True):
            own = r[heads, begin : begin + len(step)]
            made.append(Distances(own, u[heads], w[heads], window.after, window.step))
            begin += len(step)
        return made

    def read(
        self,
        h: Float[Tensor, "B T E"],
        query: Float[Tensor, "B H T D"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        first_key: Int[Tensor, "B T"] | None,
        positions: Sequence[Distances] | None,
    ) -> Float[Tensor, "B H T D"]:
        read = super().read(h, query, keys, values, first_key, positions)
        if not self.global_tokens:
            return read
        inputs = self.attention_residual.inputs(h)
        q, k = self.global_query_norm(self.global_query(inputs)), self.global_key_norm(self.global_key(inputs))
        q, k, v = (split_heads(x, query.shape[1]) for x in (q, k, self.global_value(inputs)))
        everywhere = self.by_groups([self.rows] * len(self.groups), q, k, v, first_key, positions)
        place = torch.arange(query.shape[2], device=h.device)
        place = place if first_key is None else place - first_key[:, None]
        return torch.where((place < self.global_tokens)[..., None], everywhere, read)


class Longformer(TwoSidedOption):
    Config: ClassVar[type] = LongformerConfig

    def __init__(self, config: LongformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(LongformerLayer(config, n) for n in range(config.layers))
        self.u = nn.Parameter(torch.empty(config.heads, config.head_size))
        self.w = nn.Parameter(torch.empty(config.heads, config.head_size))
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    @property
    def has_memory(self) -> bool:
        return self.config.memory > 0

    @property
    def reach(self) -> int:
        """With memory one window per layer; without, as far as windows lead within a segment."""
        c = self.config
        if self.has_memory:
            return sum(c.span(n) for n in range(c.layers))
        return farthest(self.layers, c.segment)

    @property
    def state_size(self) -> int:
        """Projected keys and values of each layer's farthest distance."""
        c = self.config
        return sum(2 * c.span(n) * c.heads * c.head_size for n in range(c.layers)) if self.has_memory else 0

    def initial_state(self, batch: int, *, projected: bool | None = None) -> State:
        """Nothing read yet; with memory, hidden states while training, projected keys and values with fixed weights."""
        c, like = self.config, self.embedding.tables[0]
        length = torch.zeros(batch, dtype=torch.int64, device=like.device)
        if not self.has_memory:
            return State(length)
        projected = not self.training if projected is None else projected
        return empty_memory(c, like, batch, projected=projected)

    def state_forms(self) -> list[State]:
        if not self.has_memory:
            return [self.initial_state(1), window_form(self)]
        return [self.initial_state(1, projected=projected) for projected in (True, False)]

    def room(self, state: State) -> int:
        return held(state, alike=False) if self.has_memory else window_room(state, self.config.vocabulary)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        B, T = tokens.shape
        state = self.initial_state(B) if state is None else state
        state.require_rows(B)
        hidden = [self.dropout(self.embedding(tokens))]
        if self.has_memory:
            state = self._with_memory(hidden, state, starts)
        else:
            first_key = None if starts is None else first_visible(torch.zeros_like(state.length), 0, T, starts)
            layer: Any
            for layer in self.layers:
                keys, values = layer.keys_values(hidden[-1])
                hidden.append(layer(hidden[-1], keys, values, first_key, self._positions(layer)))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        return tuple(hidden), state

    def _with_memory(self, hidden: list[Tensor], state: State, starts: Bool[Tensor, "B T"] | None) -> State:
        """Appends every layer's output to `hidden`; each layer remembers as far as its window reaches."""
        T, spans = hidden[0].shape[1], [self.config.span(n) for n in range(self.config.layers)]
        require_memory(state, hidden[0].shape[0], self.config.layers)
        remembered = [part.shape[-2] for part in next(iter(state.parts.values()))]
        most = max(remembered)
        first = first_visible(state.length.clamp(max=most), most, T, starts)
        kept: dict[str, tuple[Tensor, ...]] = dict.fromkeys(state.parts, ())
        for n, layer in enumerate(self.layers):
            memory = {name: part[n] for name, part in state.parts.items()}
            keys, values, after = with_memory(layer, hidden[-1], memory, spans[n])
            kept = {name: (*kept[name], part) for name, part in after.items()}
            first_key = (first - (most - remembered[n])).clamp(min=0)
            hidden.append(layer(hidden[-1], keys, values, first_key, self._positions(layer)))
        return State(remaining(first, most, max(spans)), kept)

    def _positions(self, layer: Any) -> Sequence[Distances]:
        return layer.positions(self.u, self.w, self.dropout)

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        require_causal(self.config.causal)
        state = self.initial_state(batch) if state is None else state
        return StreamDecoder(self, state) if self.has_memory else WindowDecoder(self, state, self.config.segment)
