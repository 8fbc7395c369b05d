"""XLNet (Yang et al. 2019, arXiv 1906.08237): permutation language modelling on Transformer-XL's memory. docs/xlnet.md

Two streams share all weights. The content stream h sees the token at its position, the query stream g does not:

    h_i = attend(query from h_i, keys from [memory; h_j])        j not after i in the order, i included
    g_i = attend(query from g_i, keys from [memory; h_j])        j before i in the order

    score(i, j) = ((q_i + u) . k_j + (q_i + w) . Wr R_{i-j} + (q_i + s) . e_same(i,j)) / sqrt(D)

R is the sinusoid of Transformer-XL for distances of both signs; e is one of two vectors, for keys of the same segment
(the texts of a pair) and of another. In the first layer h is the embedding of a token and g a learned vector. Both
streams have the same keys, so a layer computes them together: its rows are those of h, then those of g. The scores are
in kernels/bidirectional_attention/reference.py.

Training draws an order for every row. One token in `predict_every` is predicted by its query stream, from all others
and from the predicted ones before it in the order. In the left-to-right order this is an ordinary language model, in
which the query of position t + 1 predicts the token after t: that is what scoring and generation use. For tasks,
`encode` is the content stream without an order, so that every position sees its whole document.
Axes: as in transformer_xl.py; N predicted positions; R rows of both streams.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache import AttentionCache, KeyValueCache, Memory, SegmentMask, empty_cache, extend, next_state
from longspan.cache import open_state as open_stream
from longspan.contract import LanguageModel, State
from longspan.hints import Hints
from longspan.kernels.bidirectional_attention import View, bidirectional_attention
from longspan.nn.attention import merge_heads, split_heads
from longspan.nn.biased_layer import initialise_normal
from longspan.nn.memory_projection import memory_products
from longspan.nn.model_config import HeadsConfig, require
from longspan.nn.positions import sinusoid
from longspan.nn.whole_batch import random_rows
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class XLNetConfig(HeadsConfig):
    heads: int = 4
    head_width: int | None = None
    inner: int | None = None
    attention_dropout: float = 0.0
    predict_every: int = 6
    """One token in this many is predicted in training: the paper's K."""
    separator: int | None = None
    """The token that ends each text of a pair, for the segment encodings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.predict_every >= 1, f"model.predict_every={self.predict_every} must be at least 1")
        known = self.separator is None or 0 <= self.separator < self.vocabulary
        require(known, f"model.separator={self.separator} must be a token id between 0 and {self.vocabulary - 1}")


class Block(nn.Module):
    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        E, H, D = config.width, config.heads, config.head_size
        self.heads, self.attention_dropout = H, config.attention_dropout
        self.query, self.key, self.value, self.position = (nn.Linear(E, H * D, bias=False) for _ in range(4))
        self.output = nn.Linear(H * D, E, bias=False)
        self.u, self.w, self.s = (nn.Parameter(torch.empty(H, D)) for _ in range(3))
        self.segments = nn.Parameter(torch.empty(2, H, D))
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(E, eps=1e-12) for _ in range(2))
        self.up, self.down = nn.Linear(E, config.inner_size), nn.Linear(config.inner_size, E)
        self.dropout = nn.Dropout(config.dropout)

    def keys_values(self, context: Float[Tensor, "B K E"]) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]:
        return split_heads(self.key(context), self.heads), split_heads(self.value(context), self.heads)

    def memory_keys_values(
        self, memory: Float[Tensor, "B M E"], h: Float[Tensor, "B T E"]
    ) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]:
        """`keys_values` of [memory; h] without a gradient of the memory."""
        keys, values = memory_products(memory, h, self.key.weight, self.value.weight)
        return split_heads(keys, self.heads), split_heads(values, self.heads)

    def extend(
        self, memory: AttentionCache, h: Float[Tensor, "B T E"], limit: int
    ) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"], AttentionCache | None]:
        """Keys and values of [memory; h], and the memory after the segment."""
        both = self.memory_keys_values if h.is_cuda and torch.is_grad_enabled() else None
        return extend(memory, h, self.keys_values, limit, both)

    def forward(
        self, x: Float[Tensor, "B R E"], keys: Tensor, values: Tensor, R: Float[Tensor, "C E"], view: View
    ) -> Float[Tensor, "B R E"]:
        q = split_heads(self.query(x), self.heads)
        r = split_heads(self.position(R)[None], self.heads)[0]
        biases = (self.u, self.w, self.s, self.segments)
        dropout = self.attention_dropout if self.training else 0.0
        found = bidirectional_attention(q, keys, values, r, *biases, view, dropout=dropout)
        x = self.attention_norm(x + self.dropout(self.output(merge_heads(found))))
        change = self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))
        return self.feed_forward_norm(x + change)


class XLNet(LanguageModel):
    Config: ClassVar[type] = XLNetConfig
    settings = frozenset({"segment", "memory", "temperature"})
    causal = False
    draws_targets = True
    layers: Any

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding(scaled=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.query_start = nn.Parameter(torch.empty(config.width))
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise_normal(self)

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(graph_safe=True, shard_layers=False)

    def has_memory(self, reading: Reading | None = None) -> bool:
        return (reading or self.reading).memory > 0

    def reach(self, reading: Reading | None = None) -> int:
        """One hop per layer, from a segment's last position back to the oldest position that each one sees."""
        reading, position = reading or self.reading, -1
        for _ in range(self.config.layers):
            position = position // reading.segment * reading.segment - reading.memory
        return -1 - position

    def initial_state(
        self, batch: int = 1, reading: Reading | None = None, *, trainable: bool | None = None, filled: bool = False
    ) -> State:
        c, reading, like = self.config, reading or self.reading, self.embedding.tables[0]
        self.check_reading(reading)
        shape: dict[str, Any] = {"width": c.width, "heads": c.heads, "head_width": c.head_size}
        shape["trainable"] = self.training if trainable is None else trainable
        empty = empty_cache(like, batch, reading.memory * filled, **shape)
        length = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return State((empty,) * c.layers, length, reading, full=not filled)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """In the left-to-right order: the embedding, the content stream of every layer but the last, and the query
        stream of the last one, which predicts the next token. All tokens count as one segment: segment encodings are
        for training with a `separator` and for `encode`."""
        state, memories, mask = self.begin(tokens, state, starts)
        position = torch.arange(mask.tokens, device=tokens.device)[None]
        order = F.pad(position, (mask.cached, 0), value=-1)
        visible = documents(mask, position) & (order[:, None] <= position[..., None])
        # Token t is seen by the query of position t + 1.
        view = View(torch.cat([visible, visible], dim=1), mask.cached + torch.cat([position, position + 1], dim=1))
        return self.run_layers(tokens, state, memories, mask, view)

    def encode(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The content stream without an order: every position sees its document in the memory and the segment."""
        state, memories, mask = self.begin(tokens, state, starts)
        position = torch.arange(mask.tokens, device=tokens.device)[None]
        view = View(documents(mask, position), mask.cached + position, self.others(tokens, mask, position))
        return self.run_layers(tokens, state, memories, mask, view)

    def run_layers(
        self, tokens: Int[Tensor, "B T"], state: State, memories: list[AttentionCache], mask: SegmentMask, view: View
    ) -> tuple[tuple[Tensor, ...], State]:
        """The content stream: the embedding and the output of every layer. If the view has further rows, they are those
        of the query stream, and the last output is that of the query stream instead."""
        (B, T), queries = tokens.shape, view.at.shape[1] - tokens.shape[1]
        x = self.dropout(self.embedding(tokens))
        if queries:
            g = self.dropout(self.query_start.to(x.dtype).expand(B, queries, -1))
            x = torch.cat([x, g], dim=1)
        R = self.dropout(distances(mask, x))
        hidden, caches = [], []
        for n, (block, memory) in enumerate(zip(self.layers, memories, strict=True), start=1):
            # A copy: the strides of the memory must not depend on the number of queries.
            h = x[:, :T].contiguous() if queries else x
            keys, values, cache = block.extend(memory, h, mask.memory)
            if queries and n == len(self.layers):
                x, view = x[:, T:], view.rows(T)  # nobody reads h of the last layer
            x = block(x, keys, values, R, view)
            hidden.append(h)
            caches.append(cache)
        return (*hidden, self.dropout(x)), next_state(state, mask, tuple(caches), mask.memory)

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],  # noqa: ARG002 (the tokens themselves are predicted)
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        tokens = self.with_separators(tokens)
        drawn, count = random_rows(tokens), max(1, tokens.shape[1] // self.config.predict_every)
        if self.config.separator is not None:
            drawn = torch.where(tokens == self.config.separator, -1.0, drawn)  # never predicted
        losses, state = self.permuted_losses(tokens, drawn.topk(count, dim=1).indices, state, starts)
        return losses.mean(), state

    def with_separators(self, tokens: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Half of the rows as two texts, for the segment encodings: a random token becomes a separator."""
        if self.config.separator is None or tokens.shape[1] == 1:
            return tokens
        place, pair = random_rows(tokens).argmax(1, keepdim=True), random_rows(tokens[:, :1]) < 0.5
        return tokens.scatter(1, place, torch.where(pair, self.config.separator, tokens.gather(1, place)))

    def permuted_losses(
        self,
        tokens: Int[Tensor, "B T"],
        chosen: Int[Tensor, "B N"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B N"], State]:
        """The losses of the tokens at the chosen positions, predicted in this order after all other tokens."""
        state, memories, mask = self.begin(tokens, state, starts)
        rank = torch.arange(chosen.shape[1], device=tokens.device).expand_as(chosen)
        order = torch.full_like(tokens, -1).scatter(1, chosen, rank)
        # A row of h sees the tokens up to its own in the order, a row of g those before.
        last = torch.cat([order, rank - 1], dim=1)
        own = torch.arange(mask.tokens, device=tokens.device).expand_as(tokens)
        position = torch.cat([own, chosen], dim=1)
        before = F.pad(order, (mask.cached, 0), value=-1)[:, None] <= last[..., None]
        visible = documents(mask, position) & before
        view = View(visible, mask.cached + position, self.others(tokens, mask, position))
        hidden, state = self.run_layers(tokens, state, memories, mask, view)
        return self.head.losses(hidden[-1], tokens.gather(1, chosen), state.reading.temperature), state

    def begin(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[State, list[AttentionCache], SegmentMask]:
        state = open_stream(self, tokens, state, Memory, KeyValueCache)
        memories = [cache.trim(state.reading.memory) for cache in state.caches]
        mask = SegmentMask.of(state, memories[0].positions, tokens.shape[1], starts)
        return replace(state, shared=()), memories, mask

    def others(
        self, tokens: Int[Tensor, "B T"], mask: SegmentMask, position: Int[Tensor, "P R"]
    ) -> Bool[Tensor, "B R K"] | None:
        """Whether a key belongs to another segment than a row: one of the texts, or what follows the last separator, as
        [extract] does. A separator ends its text; the memory belongs to the first one."""
        if self.config.separator is None:
            return None
        ends = tokens == self.config.separator
        segment = ends.cumsum(1) - ends.long()
        own = segment.gather(1, position.expand(len(tokens), -1))
        return own[..., None] != F.pad(segment, (mask.cached, 0))[:, None]


def documents(mask: SegmentMask, position: Int[Tensor, "P R"]) -> Bool[Tensor, "B R K"]:
    """Whether a key is valid and in the document of a row, before or after it. The first axes may be 1."""
    if mask.first_key is None:
        return torch.ones(*position.shape, mask.keys, dtype=torch.bool, device=position.device)
    position = position.expand(len(mask.first_key), -1)
    seen = torch.arange(mask.keys, device=position.device) >= mask.first_key.gather(1, position)[..., None]
    if mask.starts is None:
        return seen
    # The document of a later key must have started at or before this row.
    number = mask.starts.cumsum(1)
    return seen & (F.pad(number, (mask.cached, 0))[:, None] <= number.gather(1, position)[..., None])


def distances(mask: SegmentMask, like: Float[Tensor, "B T E"]) -> Float[Tensor, "C E"]:
    """The sinusoids of the distances K, K - 1, ..., 1 - T; negative ones are of later keys. A few more follow, because
    products are much faster if the number of columns is a multiple of 8."""
    count = -(-(mask.keys + mask.tokens) // 8) * 8
    distance = mask.keys - torch.arange(count, dtype=torch.float64, device=like.device)
    return sinusoid(distance, like.shape[-1]).to(like.dtype)
