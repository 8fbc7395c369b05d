"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860), the complete model. docs/transformer_xl.md

A text is read one segment at a time. Every layer keeps its inputs at earlier positions as a memory, without gradient,
and the next segment attends to them. For a layer with input h and memory m:

    h~ = [stop_gradient(m) ; h]        q = h Wq    k = h~ Wk    v = h~ Wv    r_d = Wr R_d
    score(i, j) = ( (q_i + u) . k_j  +  (q_i + w) . r_{i-j} ) / sqrt(D)              for j <= i
                     (a) + (c)             (b) + (d)
    a_i = sum_j softmax_j(score(i, j)) v_j
    h'  = norm(h + Wo a)               h'' = norm(h' + W2 relu(W1 h'))

(a) content, (b) content-dependent position, (c) global content, (d) global position. R_d is a sinusoid of the distance
d; u and w, the paper's u and v, are learned per head. Attention itself is in kernels/relative_attention/reference.py.
Axes: B batch, T tokens of the segment, M memory, K = M + T keys, H heads, D width of a head, E width of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache import (
    AttentionCache,
    KeyValueCache,
    Memory,
    SegmentMask,
    empty_cache,
    join,
    newest,
    next_state,
    open_state,
)
from longspan.contract import LanguageModel, State
from longspan.hints import Hints
from longspan.kernels.relative_attention import relative_attention
from longspan.nn.attention import merge_heads, split_heads
from longspan.nn.model_config import ModelConfig, check_heads
from longspan.nn.positions import reusable_tables
from longspan.nn.transformer import initialise
from longspan.reading import Reading
from longspan.segments import check_segment
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(ModelConfig):
    """Everything that determines the weights: keys of the paper and of the authors' code only. `ModelConfig` adds
    vocabulary, layers, width, dropout, and the adaptive embedding and softmax."""

    heads: int = 4
    head_width: int | None = None
    """Default: width / heads."""
    inner: int | None = None
    """Width of the feed-forward layer. Default: 4 * width."""
    norm: Literal["post", "pre"] = "post"
    """The paper's models are post-norm. Pre-norm, as in the authors' code, has no final norm."""
    shared_biases: bool = True
    """One u and w for all layers, as in the authors' PyTorch code, or a pair per layer."""
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def inner_size(self) -> int:
        return self.inner or 4 * self.width


class Block(nn.Module):
    """One layer: `x, cache = block(x, cache, mask, r, u, w)`."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        E, H, D = config.width, config.heads, config.head_size
        self.heads, self.pre_norm, self.attention_dropout = H, config.norm == "pre", config.attention_dropout
        self.query, self.key, self.value = (nn.Linear(E, H * D, bias=False) for _ in range(3))  # Wq, Wk, Wv
        self.output = nn.Linear(H * D, E, bias=False)  # Wo
        self.attention_norm = nn.LayerNorm(E)
        self.up, self.down = nn.Linear(E, config.inner_size), nn.Linear(config.inner_size, E)  # W1, W2
        self.feed_forward_norm = nn.LayerNorm(E)
        self.position = nn.Linear(E, H * D, bias=False)  # Wr
        if not config.shared_biases:
            self.u, self.w = (nn.Parameter(torch.empty(H, D)) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        cache: AttentionCache,
        mask: SegmentMask,
        r: Float[Tensor, "H C D"],
        u: Float[Tensor, "H D"],
        w: Float[Tensor, "H D"],
    ) -> tuple[Float[Tensor, "B T E"], AttentionCache]:
        keys, values, cache = self.extend(cache, x, mask.memory)
        if self.pre_norm:
            x = x + self.attend(self.attention_norm(x), keys, values, mask, r, u, w)
            x = x + self.feed_forward(self.feed_forward_norm(x))
        else:
            x = self.attention_norm(x + self.attend(x, keys, values, mask, r, u, w))
            x = self.feed_forward_norm(x + self.feed_forward(x))
        return x, cache

    def extend(
        self, cache: AttentionCache, x: Float[Tensor, "B T E"], limit: int
    ) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"], AttentionCache]:
        """Keys and values of [memory; segment], and the cache after the segment: its last `limit` positions."""
        if isinstance(cache, Memory):
            # Training: the gradient stops at the memory but reaches Wk and Wv through it, so it is projected again.
            context = torch.cat([cache.hidden.to(x.dtype), x], dim=1)
            return *self.keys_values(context), Memory(newest(context.detach(), x.detach(), limit, dim=1))
        # Fixed weights: cached keys and values are the same numbers, and nothing is projected twice.
        new_keys, new_values = self.keys_values(x)
        keys, values = join(cache.keys, new_keys), join(cache.values, new_values)
        pairs = (keys, new_keys), (values, new_values)
        return keys, values, KeyValueCache(*(newest(old.detach(), new.detach(), limit, dim=2) for old, new in pairs))

    def keys_values(self, context: Float[Tensor, "B K E"]) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]:
        context = self.attention_norm(context) if self.pre_norm else context
        return split_heads(self.key(context), self.heads), split_heads(self.value(context), self.heads)

    def distance_keys(self, R: Float[Tensor, "C E"]) -> Float[Tensor, "H C D"]:
        """r_d = Wr R_d."""
        return self.position(R).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def attend(
        self,
        h: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        mask: SegmentMask,
        r: Float[Tensor, "H C D"],
        u: Float[Tensor, "H D"],
        w: Float[Tensor, "H D"],
    ) -> Float[Tensor, "B T E"]:
        """Wo [a_1; ...; a_H], with a_i = sum_j softmax_j(score(i, j)) v_j for every head."""
        query = split_heads(self.query(h), self.heads)
        r, u, w = (part.to(query.dtype) for part in (r, u, w))
        dropout = self.attention_dropout if self.training else 0.0
        heads = relative_attention(
            query, keys, values, r, u, w, window=mask.window, first_key=mask.first_key, dropout=dropout
        )
        return self.dropout(self.output(merge_heads(heads)))

    def feed_forward(self, h: Float[Tensor, "... E"]) -> Float[Tensor, "... E"]:
        return self.dropout(self.down(self.dropout(F.relu(self.up(h)))))


class TransformerXL(LanguageModel):
    Config: ClassVar[type] = TransformerXLConfig
    settings = frozenset({"segment", "memory", "clamp", "same_length", "temperature"})
    layers: Any

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()  # sqrt(E) Table[token]; a table per cluster where there are cutoffs
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        if config.shared_biases:
            self.u, self.w = (nn.Parameter(torch.empty(config.heads, config.head_size)) for _ in range(2))
        self.head = config.make_head(self.embedding)  # softmax(x Table^T + b), adaptive where there are cutoffs
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(graph_safe=not self.config.cutoffs)

    def has_memory(self, reading: Reading | None = None) -> bool:
        return (reading or self.reading).memory > 0

    def initial_state(
        self, batch: int = 1, reading: Reading | None = None, *, trainable: bool | None = None, filled: bool = False
    ) -> State:
        c, reading, like = self.config, reading or self.reading, self.embedding.tables[0]
        self.check_reading(reading)
        shape = {"width": c.width, "heads": c.heads, "head_width": c.head_size}
        shape["trainable"] = self.training if trainable is None else trainable
        empty = empty_cache(like, batch, reading.memory if filled else 0, **shape)
        length = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return State((empty,) * c.layers, length, reading, full=not filled)

    def forward(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        """Logits of the next token at every position, and the state after the segment."""
        check_segment(tokens, starts=starts)
        hidden, state = self.hidden_states(tokens, state, starts)
        return self.head.logits(hidden[-1], state.reading.temperature), state

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        state = open_state(self, tokens, state, Memory, KeyValueCache)
        memory = state.reading.memory
        cached = [cache.trim(memory) for cache in state.caches]
        mask = SegmentMask.of(state, cached[0].positions, tokens.shape[1], starts)

        x = self.dropout(self.embedding(tokens))
        distance_keys, tables = self.distance_keys(state, mask)
        hidden, caches = [x], []
        for block, cache, r in zip(self.layers, cached, distance_keys, strict=True):
            biases = self if self.config.shared_biases else block
            x, cache = block(x, cache, mask, r, biases.u, biases.w)
            hidden.append(x)
            caches.append(cache)
        hidden[-1] = self.dropout(x)
        # Each row has at most `memory` valid positions, none from before its last document start.
        return tuple(hidden), next_state(state, mask, tuple(caches), memory, tables)

    def distance_keys(self, state: State, mask: SegmentMask) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
        """r of every layer for the distances of this segment, and the tables that the next segment can use again.

        Distances beyond the clamp share its key, and those beyond the window are not visible.
        """

        def R(count: int) -> Float[Tensor, "C E"]:
            return self.dropout(sinusoid(count, self.config.width, self.embedding.tables[0]))

        counts = [mask.distances(state.reading.clamp)] * len(self.layers)
        return reusable_tables([block.distance_keys for block in self.layers], counts, state, R)

    def reach(self, reading: Reading | None = None) -> int:
        """One hop per layer, from a segment's last position back to the oldest position that each one sees."""
        reading, position = reading or self.reading, -1
        for _ in range(self.config.layers):
            if reading.same_length:
                position -= reading.memory - 1
            else:
                position = position // reading.segment * reading.segment - reading.memory
        return -1 - position


def sinusoid(count: int, width: int, like: Tensor) -> Float[Tensor, "C E"]:
    """R_d = [sin(d f_0), sin(d f_1), ..., cos(d f_0), cos(d f_1), ...] for d = count-1, ..., 1, 0, with
    f_k = 10000^(-2k / width). Angles are in float64: in float32 they are off by 1e-4 at distances of a few thousand."""
    distance = torch.arange(count - 1, -1, -1, dtype=torch.float64, device=like.device)
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width].to(like.dtype)
