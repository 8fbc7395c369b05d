"""XLNet (Yang et al. 2019, arXiv 1906.08237): permutation language modelling on Transformer-XL's memory. docs/xlnet.md

Two streams share all weights. The content stream h sees the token at its position, the query stream g does not:

    h_i = attend(query from h_i, keys from [memory; h_j])        j not after i in the order, i included
    g_i = attend(query from g_i, keys from [memory; h_j])        j before i in the order

    score(i, j) = ((q_i + u) . k_j + (q_i + w) . Wr R_{i-j} + (q_i + s) . e_same(i,j)) / sqrt(D)

R is the sinusoid of Transformer-XL for distances of both signs; e is one of two vectors, for keys of the same segment
(the texts of a pair) and of another. In the first layer h is the embedding of a token and g a learned vector.

Training draws an order for every row. One token in `predict_every` is predicted by its query stream, from all others
and from the predicted ones before it in the order. In the left-to-right order this is an ordinary language model, in
which the query of position t + 1 predicts the token after t: that is what scoring and generation use. For tasks,
`encode` is the content stream without an order, so that every position sees its whole document.
Axes: as in transformer_xl.py; N predicted positions.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache import AttentionCache, KeyValueCache, Memory, SegmentMask, empty_cache, extend, next_state
from longspan.cache import open_state as open_stream
from longspan.contract import LanguageModel, State
from longspan.hints import Hints
from longspan.nn.attention import merge_heads, split_heads
from longspan.nn.biased_layer import initialise_normal
from longspan.nn.model_config import ModelConfig, check_heads, require
from longspan.nn.whole_batch import random_rows
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class XLNetConfig(ModelConfig):
    heads: int = 4
    head_width: int | None = None
    inner: int | None = None
    attention_dropout: float = 0.0
    predict_every: int = 6
    """One token in this many is predicted in training: the paper's K."""
    separator: int | None = None
    """The token that ends the first text of a pair, for the segment encodings of `encode`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)
        require(self.predict_every >= 1, f"model.predict_every={self.predict_every} must be at least 1")
        known = self.separator is None or 0 <= self.separator < self.vocabulary
        require(known, f"model.separator={self.separator} must be a token, 0 to {self.vocabulary - 1}")

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def inner_size(self) -> int:
        return self.inner or 4 * self.width


class View(NamedTuple):
    """What the rows of a stream see: a mask over the keys [memory; segment], and how far they are from each key."""

    visible: Bool[Tensor, "B T K"]
    shift: Int[Tensor, "B T"] | None
    """None: row i is position i of the segment, or one more in all rows. Else the position of every row."""
    other: Bool[Tensor, "B T K"] | None
    """Keys of another segment; None without segments, when their score would be the same for all keys."""


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

    def stream(
        self, x: Float[Tensor, "B T E"], keys: Tensor, values: Tensor, R: Float[Tensor, "C E"], view: View
    ) -> Float[Tensor, "B T E"]:
        """One layer of one stream."""
        q = split_heads(self.query(x), self.heads)
        r = split_heads(self.position(R)[None], self.heads)
        content = (q + self.u[:, None]) @ keys.transpose(-1, -2)
        by_distance = (q + self.w[:, None]) @ r.transpose(-1, -2)
        scores = content + at_keys(by_distance, keys.shape[2], view.shift)
        if view.other is not None:
            same, other = torch.einsum("bhtd,shd->sbht", q + self.s[:, None], self.segments)
            scores = scores + torch.where(view.other[:, None], other[..., None], same[..., None])
        scores = scores * keys.shape[-1] ** -0.5
        # A row that sees nothing gets zeros: finite scores first, so that no gradient is NaN.
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores.masked_fill(~view.visible[:, None], -1e30).softmax(-1)
        weights = weights.masked_fill(~view.visible[:, None], 0.0).to(values.dtype)
        weights = F.dropout(weights, self.attention_dropout, self.training)
        x = self.attention_norm(x + self.dropout(self.output(merge_heads(weights @ values))))
        change = self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))
        return self.feed_forward_norm(x + change)


class XLNet(LanguageModel):
    Config: ClassVar[type] = XLNetConfig
    settings = frozenset({"segment", "memory", "temperature"})
    causal = False
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
        stream of the last one, which predicts the next token."""
        state, memories, mask = self.begin(tokens, state, starts)
        T = mask.tokens
        order = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        visible = documents(mask, tokens.device) & F.pad(order, (mask.cached, 0), value=True)
        view = View(visible, None, None)
        # Token t is seen by the query of position t + 1.
        return self.both_streams(tokens, state, memories, mask, view, view, queries=T, offset=1)

    def encode(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The content stream without an order: every position sees its document in the memory and the segment."""
        state, memories, mask = self.begin(tokens, state, starts)
        view = View(documents(mask, tokens.device), None, self.others(tokens, mask))
        return self.content_stream(tokens, state, memories, mask, view)

    def content_stream(
        self, tokens: Int[Tensor, "B T"], state: State, memories: list[AttentionCache], mask: SegmentMask, view: View
    ) -> tuple[tuple[Tensor, ...], State]:
        h = self.dropout(self.embedding(tokens))
        R = self.dropout(distances(mask.keys - 1, 1 - mask.tokens, h.shape[-1], h))
        hidden, caches = [h], []
        for block, memory in zip(self.layers, memories, strict=True):
            keys, values, cache = extend(memory, h, block.keys_values, mask.memory)
            h = block.stream(h, keys, values, R, view)
            hidden.append(h)
            caches.append(cache)
        hidden[-1] = self.dropout(h)
        return tuple(hidden), next_state(state, mask, tuple(caches), mask.memory)

    def both_streams(
        self,
        tokens: Int[Tensor, "B T"],
        state: State,
        memories: list[AttentionCache],
        mask: SegmentMask,
        content: View,
        query: View,
        *,
        queries: int,
        offset: int = 0,
    ) -> tuple[tuple[Tensor, ...], State]:
        """The content stream of every layer but the last, and the query stream of the last one."""
        h = self.dropout(self.embedding(tokens))
        g = self.dropout(self.query_start.to(h.dtype).expand(len(tokens), queries, -1))
        R = self.dropout(distances(mask.keys - 1 + offset, 1 - mask.tokens, h.shape[-1], h))
        count = mask.keys + mask.tokens - 1
        ahead, R = R[:count], R[offset:]
        hidden, caches = [h], []
        for n, (block, memory) in enumerate(zip(self.layers, memories, strict=True), start=1):
            keys, values, cache = extend(memory, h, block.keys_values, mask.memory)
            g = block.stream(g, keys, values, ahead, query)
            caches.append(cache)
            if n < len(self.layers):
                h = block.stream(h, keys, values, R, content)
                hidden.append(h)
        return (*hidden, self.dropout(g)), next_state(state, mask, tuple(caches), mask.memory)

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],  # noqa: ARG002 (the tokens themselves are predicted)
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        count = max(1, tokens.shape[1] // self.config.predict_every)
        chosen = random_rows(tokens).topk(count, dim=1).indices
        losses, state = self.permuted_losses(tokens, chosen, state, starts)
        return losses.mean(), state

    def permuted_losses(
        self,
        tokens: Int[Tensor, "B T"],
        chosen: Int[Tensor, "B N"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B N"], State]:
        """The losses of the tokens at the chosen positions, predicted in this order after all other tokens."""
        state, memories, mask = self.begin(tokens, state, starts)
        rank = torch.full_like(tokens, -1)
        rank.scatter_(1, chosen, torch.arange(chosen.shape[1], device=tokens.device).expand_as(chosen))
        before = rank[:, None] < rank[..., None]
        before = before | (rank < 0)[:, None]
        own = torch.eye(mask.tokens, dtype=torch.bool, device=tokens.device)
        ordered = documents(mask, tokens.device) & F.pad(before, (mask.cached, 0), value=True)
        content = View(ordered | F.pad(own, (mask.cached, 0), value=False), None, None)
        rows = chosen[..., None].expand(-1, -1, mask.keys)
        query = View(ordered.expand(len(tokens), -1, -1).gather(1, rows), chosen, None)
        hidden, state = self.both_streams(tokens, state, memories, mask, content, query, queries=chosen.shape[1])
        return self.head.losses(hidden[-1], tokens.gather(1, chosen), state.reading.temperature), state

    def begin(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[State, list[AttentionCache], SegmentMask]:
        state = open_stream(self, tokens, state, Memory, KeyValueCache)
        memories = [cache.trim(state.reading.memory) for cache in state.caches]
        mask = SegmentMask.of(state, memories[0].positions, tokens.shape[1], starts)
        return replace(state, shared=()), memories, mask

    def others(self, tokens: Int[Tensor, "B T"], mask: SegmentMask) -> Bool[Tensor, "B T K"] | None:
        """Whether a key belongs to another text of a pair. A separator ends its text; the memory is the first text."""
        if self.config.separator is None:
            return None
        ends = tokens == self.config.separator
        segment = F.pad((ends.cumsum(1) - ends.long()).clamp(max=1), (mask.cached, 0))
        return segment[:, mask.cached :, None] != segment[:, None]


def documents(mask: SegmentMask, device: torch.device) -> Bool[Tensor, "B T K"]:
    """Whether a key is valid and in the document of a row, before or after it."""
    if mask.first_key is None:
        return torch.ones(1, mask.tokens, mask.keys, dtype=torch.bool, device=device)
    key = torch.arange(mask.keys, device=mask.first_key.device)
    seen = key >= mask.first_key[..., None]
    if mask.starts is None:
        return seen
    # The document of a later key must have started at or before this row.
    number = mask.starts.cumsum(1)
    later = number[:, None] > number[..., None]
    return seen & ~F.pad(later, (mask.cached, 0), value=False)


def at_keys(
    scores: Float[Tensor, "B H T C"], keys: int, position: Int[Tensor, "B T"] | None
) -> Float[Tensor, "B H T K"]:
    """From scores by distance, longest first, to scores by key. Row i at position p of the segment is at column
    T' - 1 - p + j for key j, where T' = C - K + 1 is the length of the segment."""
    rows, segment = scores.shape[2], scores.shape[3] - keys + 1
    if position is not None:
        column = segment - 1 - position[..., None] + torch.arange(keys, device=scores.device)
        return scores.gather(-1, column[:, None].expand(*scores.shape[:3], keys))
    if rows == 1:
        return scores[..., :keys]
    # Every row is one column further: the same buffer with rows that are shorter by one.
    width = keys + rows - 2
    return scores.flatten(-2)[..., rows - 1 : rows - 1 + rows * width].unflatten(-1, (rows, width))[..., :keys]


def distances(first: int, last: int, width: int, like: Tensor) -> Float[Tensor, "C E"]:
    """The sinusoids of the distances first, first - 1, ..., last; negative ones are of later keys."""
    distance = torch.arange(first, last - 1, -1, dtype=torch.float64, device=like.device)
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width].to(like.dtype)
