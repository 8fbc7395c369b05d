"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860), the complete model. docs/transformer_xl.md

A text is read one segment at a time. Every layer keeps its inputs at earlier positions as a memory, without gradient,
and the next segment attends to them. From the tokens x_1 ... x_T of a segment:

    h = sqrt(E) Table[x]
    for each layer with memory m:
        h~ = [stop_gradient(m) ; h]        q = h Wq    k = h~ Wk    v = h~ Wv    r_d = Wr R_d
        score(i, j) = ( (q_i + u) . k_j  +  (q_i + w) . r_{i-j} ) / sqrt(D)          for j <= i
                         (a) + (c)             (b) + (d)
        a_i = sum_j softmax_j(score(i, j)) v_j
        h   = norm(h + Wo a)               h = norm(h + W2 relu(W1 h))
    p(next token) = softmax(h Table^T + b)

(a) content, (b) content-dependent position, (c) global content, (d) global position. R_d is a sinusoid of the distance
d; u and w, the paper's u and v, are learned per head. Attention itself is in kernels/relative_attention/reference.py.
Axes: B batch, T tokens of the segment (L in the kernel), M memory, K = M + T keys, C distances, H heads, D width of a
head, E width of the model, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache import (
    AttentionCache,
    KeyValueCache,
    Memory,
    expanded_zeros,
    join_product,
    newest,
    newest_pairs,
    open_state,
)
from longspan.contract import LanguageModel, State
from longspan.hints import Hints
from longspan.kernels.relative_attention import relative_attention
from longspan.nn.model_config import HeadsConfig
from longspan.nn.positions import reusable_tables
from longspan.nn.transformer import initialise
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(HeadsConfig):
    """Everything that determines the weights: keys of the paper and of the authors' code only."""

    vocabulary: int = 256
    layers: int = 6
    width: int = 256
    heads: int = 4
    head_width: int | None = None
    """Default: width / heads."""
    inner: int | None = None
    """Width of the feed-forward layer. Default: 4 * width."""
    norm: Literal["post", "pre"] = "post"
    """The paper's models are post-norm. Pre-norm, as in the authors' code, has no final norm."""
    shared_biases: bool = True
    """One u and w for all layers, as in the authors' PyTorch code, or a pair per layer."""
    dropout: float = 0.1
    attention_dropout: float = 0.0
    # Large vocabularies: nn/embedding.py and nn/adaptive_softmax.py.
    embedding_width: int | None = None
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    tie_embedding: bool = True
    tie_projections: bool = False


class Visible(NamedTuple):
    """Which of the keys [memory; segment] a query sees: those from `first_key` to its own, which is key M + i for query
    i, and with a window only the last of them. Far keys may be discounted (reference.py)."""

    window: int | None
    first_key: Int[Tensor, "B T"] | None
    """None if every query sees all keys before it."""
    discount: float


class Block(nn.Module):
    """One layer: `h, cache = block(h, cache, memory, visible, r, u, w)`."""

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
        h: Float[Tensor, "B T E"],
        cache: AttentionCache,
        memory: int,
        visible: Visible,
        r: Float[Tensor, "H C D"],
        u: Float[Tensor, "H D"],
        w: Float[Tensor, "H D"],
    ) -> tuple[Float[Tensor, "B T E"], AttentionCache]:
        keys, values, cache = self.extend(cache, h, memory)
        if self.pre_norm:
            h = h + self.attend(self.attention_norm(h), keys, values, visible, r, u, w)
            h = h + self.feed_forward(self.feed_forward_norm(h))
        else:
            h = self.attention_norm(h + self.attend(h, keys, values, visible, r, u, w))
            h = self.feed_forward_norm(h + self.feed_forward(h))
        return h, cache

    def extend(
        self, cache: AttentionCache, h: Float[Tensor, "B T E"], memory: int
    ) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"], AttentionCache]:
        """Keys and values of [memory; segment], and the cache after the segment: its `memory` newest positions."""
        if isinstance(cache, Memory):
            # Training: the gradient stops at the memory but reaches Wk and Wv through it, so it is projected again.
            context = torch.cat([cache.hidden.to(h.dtype), h], dim=1)
            return *self.keys_values(context), Memory(newest(context.detach(), h.detach(), memory, dim=1))
        # Fixed weights: the keys and values of the memory are kept instead. They equal the recomputed ones.
        x = self.attention_norm(h) if self.pre_norm else h
        keys, values = join_product(cache.keys, x, self.key), join_product(cache.values, x, self.value)  # [cached; new]
        return keys, values, newest_pairs(keys, values, h.shape[1], memory)

    def keys_values(self, context: Float[Tensor, "B K E"]) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]:
        context = self.attention_norm(context) if self.pre_norm else context
        return self.split_heads(self.key(context)), self.split_heads(self.value(context))

    def position_keys(self, R: Float[Tensor, "C E"]) -> Float[Tensor, "H C D"]:
        """r_d = Wr R_d."""
        return self.split_heads(self.position(R)[None])[0]

    def split_heads(self, x: Float[Tensor, "B K I"]) -> Float[Tensor, "B H K D"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(
        self,
        h: Float[Tensor, "B T E"],
        keys: Float[Tensor, "B H K D"],
        values: Float[Tensor, "B H K D"],
        visible: Visible,
        r: Float[Tensor, "H C D"],
        u: Float[Tensor, "H D"],
        w: Float[Tensor, "H D"],
    ) -> Float[Tensor, "B T E"]:
        """Wo [a_1; ...; a_H], with a_i = sum_j softmax_j(score(i, j)) v_j for every head."""
        query = self.split_heads(self.query(h))
        r, u, w = (part.to(query.dtype) for part in (r, u, w))
        dropout = self.attention_dropout if self.training else 0.0
        a = relative_attention(query, keys, values, r, u, w, **visible._asdict(), dropout=dropout)
        return self.dropout(self.output(a.transpose(1, 2).flatten(2)))

    def feed_forward(self, h: Float[Tensor, "... E"]) -> Float[Tensor, "... E"]:
        return self.dropout(self.down(self.dropout(F.relu(self.up(h)))))


class TransformerXL(LanguageModel):
    Config: ClassVar[type] = TransformerXLConfig
    settings = frozenset({"segment", "memory", "clamp", "discount", "same_length", "temperature"})
    layers: Any

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()  # sqrt(E) Table[x]; with cutoffs, a table per cluster
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        if config.shared_biases:
            self.u, self.w = (nn.Parameter(torch.empty(config.heads, config.head_size)) for _ in range(2))
        self.head = config.make_head(self.embedding)  # softmax(h Table^T + b); with cutoffs, an adaptive softmax
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(graph_safe=True, shard_layers=self.config.shared_biases)

    def has_memory(self, reading: Reading | None = None) -> bool:
        return (reading or self.reading).memory > 0

    def initial_state(
        self, batch: int = 1, reading: Reading | None = None, *, trainable: bool | None = None, filled: bool = False
    ) -> State:
        c, reading, like = self.config, reading or self.reading, self.embedding.tables[0]
        self.check_reading(reading)
        M = reading.memory if filled else 0
        empty: AttentionCache
        if self.training if trainable is None else trainable:
            empty = Memory(expanded_zeros(like, batch, M, c.width))
        else:
            empty = KeyValueCache(*[expanded_zeros(like, batch, c.heads, M, c.head_size)] * 2)
        length = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return State((empty,) * c.layers, length, reading, full=not filled)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The embedding and every layer's output; logits and losses are those of `self.head` for the last of them."""
        state = open_state(self, tokens, state, Memory, KeyValueCache)
        reading, T = state.reading, tokens.shape[1]
        memories = [cache.trim(reading.memory) for cache in state.caches]
        M = memories[0].positions
        visible = Visible(reading.window, self.first_key(state, M, T, starts), reading.discount)

        h = self.dropout(self.embedding(tokens))
        position_keys, kept = self.position_keys(state, M + T)
        hidden, caches = [h], []
        for block, memory, r in zip(self.layers, memories, position_keys, strict=True):
            biases = self if self.config.shared_biases else block
            h, cache = block(h, memory, reading.memory, visible, r, biases.u, biases.w)
            hidden.append(h)
            caches.append(cache)
        hidden[-1] = self.dropout(h)

        # A row keeps the positions that its last token sees, at most `memory`.
        length = state.length + T if visible.first_key is None else M + T - visible.first_key[:, -1]
        length, full = length.clamp(max=reading.memory), starts is None and (state.full or reading.memory <= T)
        return tuple(hidden), replace(state, caches=tuple(caches), length=length, full=full, shared=kept)

    def first_key(self, state: State, M: int, T: int, starts: Bool[Tensor, "B T"] | None) -> Int[Tensor, "B T"] | None:
        """The oldest key that each query sees: the first valid position of the memory, or the first token of its
        document."""
        if starts is None and state.full:
            return None
        first_key = (M - state.length.clamp(max=M))[:, None].expand(-1, T)
        if starts is None:
            return first_key
        key = torch.arange(M, M + T, device=starts.device)
        return torch.maximum(first_key, torch.where(starts, key, 0).cummax(dim=1).values)

    def position_keys(self, state: State, K: int) -> tuple[list[Float[Tensor, "H C D"]], tuple[Tensor, ...]]:
        """r of every layer for the distances C-1, ..., 1, 0 among K keys, and what the state keeps of them."""
        reading = state.reading
        # Distances beyond the clamp share its key; those beyond the window are not visible.
        C = min(K, reading.window or K, reading.clamp + 1 if reading.clamp else K)

        def R(count: int) -> Float[Tensor, "C E"]:
            return self.dropout(sinusoid(count, self.config.width, self.embedding.tables[0]))

        return reusable_tables([block.position_keys for block in self.layers], [C] * len(self.layers), state, R)

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
