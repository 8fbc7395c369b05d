"""One token at a time on a ring of projected keys and values: constant time and space however long the stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional as F

from longspan.contract import State, read_segments
from longspan.memory.tails import mix
from longspan.shapes import Float, Int, Tensor


@runtime_checkable
class Reader(Protocol):
    """What a ring needs of a model: Transformer-XL's parts, by name."""

    config: Any
    embedding: Any
    layers: Any
    convolutions: Any
    final_norm: Any
    head: Any

    def hidden_states(self, tokens: Tensor, state: State) -> tuple[tuple[Tensor, ...], State]: ...

    def positions(self, keys: int) -> Callable[[Any], tuple[Tensor, Tensor, Tensor]]: ...


class Ring:
    """Keys and values in slots that are overwritten oldest first.

    Attention does not care in which order its keys lie, only each key's distance matters; the slot written `a` steps
    ago is at distance a. So the keys stay where they are and the distances turn. All rows advance together: rows of
    unequal age are for the general decoder.
    """

    def __init__(self, model: Reader, state: State, age: int) -> None:
        self.model = model
        self.size = model.config.window or model.config.memory + 1
        c, like = model.config, model.embedding.tables[0]
        slots = (state.batch, c.heads, self.size, c.head_size)
        self.keys, self.values = ([like.new_zeros(slots) for _ in range(c.layers)] for _ in range(2))
        tail = (state.batch, c.convolution, c.width)
        self.tails = [like.new_zeros(tail) for _ in state.parts.get("tails", ())]
        self.fill(state, age)

    def fill(self, state: State, age: int) -> None:
        """Begin with what a state holds, in the slots that are there."""
        kept = min(age, self.size)
        self.written, self.age = kept, age
        for slots, part in ((self.keys, "keys"), (self.values, "values")):
            for ring, positions in zip(slots, state.parts[part], strict=True):
                ring[:, :, :kept] = positions[:, :, positions.shape[2] - kept :]
        for tail, given in zip(self.tails, state.parts.get("tails", ()), strict=True):
            tail.zero_()
            tail[:, tail.shape[1] - given.shape[1] :] = given

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"]) -> None:
        state = read_segments(self.model, tokens, self.state())
        self.fill(state, int(state.length[0]))

    def advance(self) -> int:
        """The slot of the next token, which counts as written from now on."""
        slot, self.written = self.written % self.size, self.written + 1
        self.age = min(self.age + 1, self.model.config.memory)
        return slot

    def state(self) -> State:
        """The ring unrolled, oldest first, as a state any reader of the family can go on from."""
        begin = self.written % self.size if self.written > self.size else 0
        filled = min(self.written, self.size)

        def unroll(slots: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(s[:, :, :filled].roll(-begin, dims=2)[:, :, filled - min(filled, self.age) :] for s in slots)

        keys, values = unroll(self.keys), unroll(self.values)
        length = torch.full((keys[0].shape[0],), keys[0].shape[2], dtype=torch.int64, device=keys[0].device)
        tails = {"tails": tuple(tail.clone() for tail in self.tails)} if self.tails else {}
        return State(length, {"keys": keys, "values": values, **tails})


class RingDecoder(Ring):
    """A ring on any device, with the model's own norms and feed-forwards. For one token what costs is to ask for the
    work, so it asks for little: one product for queries, keys and values, and nothing is looked up twice."""

    def __init__(self, model: Reader, state: State, age: int) -> None:
        super().__init__(model, state, age)
        with torch.no_grad():
            position = model.positions(self.size)
            self.positions = [_ready(*position(layer), self.keys[0].dtype) for layer in model.layers]
            self.layers = [_parts(layer) for layer in model.layers]

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        with torch.inference_mode():
            logits = self.compute(tokens)
        return logits.clone()  # one that may be written to

    def compute(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        slot, before = self.advance(), self.model.config.norm == "pre"
        shape = (len(tokens), self.model.config.heads, -1)
        h = self.model.embedding(tokens[:, None])[:, 0]
        for n, layer in enumerate(self.layers):
            if self.tails:
                mixed, tail = mix(self.model.convolutions[n], h[:, None], self.tails[n], None)
                self.tails[n].copy_(tail)
                h = mixed[:, 0]
            heads = F.linear(layer.attention_norm(h) if before else h, layer.projections)
            query, key, value = heads.chunk(3, dim=-1)
            if layer.head_norms:
                query, key = (norm(part) for norm, part in zip(layer.head_norms, (query, key), strict=True))
            self.keys[n].select(2, slot).copy_(key.view(shape))
            self.values[n].select(2, slot).copy_(value.view(shape))
            h = h + F.linear(self.attend(n, query.view(shape), slot), layer.output)
            if before:
                h = h + layer.feed_forward(layer.feed_forward_norm(h))
            else:
                h = layer.attention_norm(h)
                h = layer.feed_forward_norm(h + layer.feed_forward(h))
        return self.model.head.logits(self.model.final_norm(h)[:, None])[:, 0]

    def attend(self, layer: int, query: Float[Tensor, "B H D"], slot: int) -> Float[Tensor, "B E"]:
        """What the token in `slot` reads: scores of distances, oldest first, are turned to where the slots lie."""
        filled, scale = min(self.written, self.size), query.shape[-1] ** -0.5
        distance, u, w = self.positions[layer]
        known = distance[:, :, max(distance.shape[2] - filled, 0) :]
        scores = torch.bmm(torch.add(w, query, alpha=scale).transpose(0, 1), known)
        if known.shape[2] < filled:
            scores = torch.cat([scores[..., :1].expand(-1, -1, filled - known.shape[2]), scores], dim=-1)
        if filled == self.size:
            scores = torch.cat([scores, scores], dim=-1)[..., filled - 1 - slot : 2 * filled - 1 - slot]
        if scores.is_cuda:
            scores = scores.contiguous()  # torch's kernels trust a mask to begin where they may load several numbers
        read = F.scaled_dot_product_attention(
            (query + u).unsqueeze(2),
            self.keys[layer][:, :, :filled],
            self.values[layer][:, :, :filled],
            attn_mask=scores.transpose(0, 1).unsqueeze(2),
            scale=scale,
        )
        return read.flatten(1)


def joined_projections(attention: Any) -> Float[Tensor, "P E"]:
    """Wq, Wk and Wv as one matrix: one product for all three."""
    return torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a step needs of a layer: looking it up in modules takes as long as a small product."""

    projections: Tensor
    output: Tensor
    head_norms: tuple[Any, ...]
    attention_norm: Any
    feed_forward: Any
    feed_forward_norm: Any


def _parts(layer: Any) -> _Parts:
    attention = layer.attention
    norms = (attention.query_norm, attention.key_norm)
    return _Parts(
        joined_projections(attention),
        attention.output.weight,
        () if isinstance(attention.query_norm, nn.Identity) else norms,
        layer.attention_residual.norm.forward,
        layer.feed_forward.forward,
        layer.feed_forward_residual.norm.forward,
    )


def _ready(distance: Tensor, u: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """r as columns, u, and w over sqrt(d_head)."""
    return distance.to(dtype).contiguous().transpose(1, 2), u.to(dtype), (w * w.shape[-1] ** -0.5).to(dtype)
