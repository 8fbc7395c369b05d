"""One token per step with a rolling KV cache: constant time and memory per token, for a stream of any length.

This is the fast path for layers of four-term attention. `StreamDecoder` is the definition; tests compare the two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from longspan.cache import ConvolutionCache, KeyValueCache, SegmentMask
from longspan.contract import Decoder, State
from longspan.decoding.step_layers import StepLayer, cache_size, final_norm
from longspan.kernels.relative_attention.reference import far_discount
from longspan.segments import read_segments
from longspan.shapes import Float, Int, Tensor


class RollingDecoder(Decoder):
    """Keys and values in slots; the oldest slot is overwritten first.

    Attention depends on the distances of the keys, not on their order, and the slot written `a` steps ago is at
    distance a. So keys stay in place and the position scores rotate instead. All rows must have the same length.

    A single token is launch-bound, so QKV is one product, and layers are unpacked beforehand.
    """

    can_undo = True

    def __init__(self, model: Any, state: State, layers: Sequence[StepLayer], age: int) -> None:
        self.model, self.layers, self.reading = model, layers, state.reading
        self.final_norm = final_norm(model)
        self.size, self.memory = cache_size(state), state.reading.memory
        caches = [attention_of(cache) for cache in state.caches[: len(layers)]]
        self.keys = [_slots(cache.keys, self.size) for cache in caches]
        self.values = [_slots(cache.values, self.size) for cache in caches]
        taps = [layer.convolution.weight for layer in layers if layer.convolution is not None]
        # The inputs of a convolution, and before them the one it forgot last, so that a step can be undone.
        self.history = [weight.new_zeros(state.batch, len(weight) + 1, weight.shape[1]) for weight in taps]
        self.inputs = [history[:, 1:] for history in self.history]
        self.written = self.age = self.age_before = 0
        self.load(state, age)
        with torch.no_grad():
            self.positions = [_scaled(layer, self.keys[0].dtype) for layer in layers]
            self.discounts = [self.far(layer.r.shape[1]) for layer in layers] if self.reading.discount else []

    def load(self, state: State, age: int) -> None:
        """Copy a state into the existing buffers. `age` is the number of valid positions."""
        kept = min(age, self.size)
        self.written, self.age, self.age_before = kept, age, age
        for n, cache in enumerate(state.caches[: len(self.layers)]):
            cached = attention_of(cache)
            for slots, positions in ((self.keys[n], cached.keys), (self.values[n], cached.values)):
                slots[:, :, :kept] = positions[:, :, positions.shape[2] - kept :]
            self.load_inputs(n, cache)

    def load_inputs(self, n: int, cache: Any) -> None:
        """Copy the inputs of a layer's convolution, if it has one."""
        if isinstance(cache, ConvolutionCache):
            self.inputs[n].zero_()
            self.inputs[n][:, self.inputs[n].shape[1] - cache.inputs.shape[1] :] = cache.inputs

    @torch.no_grad()
    def prefill(self, tokens: Int[Tensor, "B T"]) -> None:
        state = read_segments(self.model, tokens, self.state())
        self.load(state, int(state.length[0]))

    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        with torch.inference_mode():
            logits = self.compute(tokens)
        return logits.clone()  # outside inference mode, so that callers may modify it

    def advance(self) -> None:
        self.written += 1
        self.age, self.age_before = min(self.age + 1, self.memory), self.age

    @torch.no_grad()
    def undo(self) -> None:
        self.written, self.age = self.written - 1, self.age_before
        if self.written >= self.size == self.age:
            # The step has overwritten the oldest position. No later token attends to it.
            for slots in (*self.keys, *self.values):
                slots.select(2, self.written % self.size).zero_()
        for history in self.history:
            history[:, 1:] = history[:, :-1].clone()

    def state(self) -> State:
        """The rolling cache in order, oldest first: any decoder of the family can continue from it."""
        begin = self.written % self.size if self.written > self.size else 0
        filled = min(self.written, self.size)

        def ordered(slots: Tensor) -> Tensor:
            return slots[:, :, :filled].roll(-begin, dims=2)[:, :, filled - min(filled, self.age) :]

        caches: list[Any] = [KeyValueCache(ordered(k), ordered(v)) for k, v in zip(self.keys, self.values, strict=True)]
        if self.inputs:
            both = zip(caches, self.inputs, strict=True)
            caches = [ConvolutionCache(cache, inputs.clone()) for cache, inputs in both]
        rows, _, positions, _ = ordered(self.keys[0]).shape
        length = torch.full((rows,), positions, dtype=torch.int64, device=self.keys[0].device)
        return State(tuple(caches), length, self.reading, full=True)

    def compute(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Logits of the next token; the keys and values of this token are written to their slot."""
        x: Any = self.model.embedding(tokens[:, None])[:, 0]
        for n, layer in enumerate(self.layers):
            if layer.convolution is not None:
                x = self.convolve(n, layer, x)
            x = self.attention(n, layer, x)
            x = self.feed_forward(n, layer, x)
        return self.output(x)

    def output(self, x: Any) -> Float[Tensor, "B V"]:
        """Logits from the last layer's output."""
        return self.model.head.logits(self.final_norm(self.finish(x))[:, None], self.reading.temperature)[:, 0]

    def finish(self, x: Any) -> Float[Tensor, "B E"]:
        """A layer's output as a tensor."""
        return x

    def convolve(self, n: int, layer: StepLayer, x: Any) -> Float[Tensor, "B E"]:
        mixed, inputs = layer.convolution(x[:, None], self.inputs[n], _ONE_TOKEN)
        self.history[n][:, :1].copy_(self.inputs[n][:, :1])
        self.inputs[n].copy_(inputs)
        return mixed[:, 0]

    def attention(self, n: int, layer: StepLayer, x: Any) -> Any:
        """norm(x + Wo attend(x)), or x + Wo attend(norm(x))."""
        shape = (len(x), self.keys[n].shape[1], -1)
        heads = F.linear(layer.attention_norm(x) if layer.pre_norm else x, layer.qkv)
        query, key, value = heads.chunk(3, dim=-1)
        if layer.head_norms:
            query, key = (norm(part) for norm, part in zip(layer.head_norms, (query, key), strict=True))
        self.write(n, key.view(shape), value.view(shape))
        x = x + F.linear(self.attend(n, query.view(shape)), layer.output)
        return x if layer.pre_norm else layer.attention_norm(x)

    def write(self, n: int, key: Float[Tensor, "B H D"], value: Float[Tensor, "B H D"]) -> None:
        slot = self.written % self.size
        self.keys[n].select(2, slot).copy_(key)
        self.values[n].select(2, slot).copy_(value)

    def attend(self, n: int, query: Float[Tensor, "B H D"]) -> Float[Tensor, "B E"]:
        """Attention of one query. Position scores, largest distance first, are rotated to the order of the slots and
        added as a mask."""
        slot, filled, scale = self.written % self.size, min(self.written + 1, self.size), query.shape[-1] ** -0.5
        r, u, w = self.positions[n]
        known = r[:, :, max(r.shape[2] - filled, 0) :]
        scores = torch.bmm(torch.add(w, query, alpha=scale).transpose(0, 1), known)
        if known.shape[2] < filled:
            far = scores[..., :1].expand(-1, -1, filled - known.shape[2])
            if self.discounts:
                far = far - self.discounts[n][self.size - filled :]
            scores = torch.cat([far, scores], dim=-1)
        if filled == self.size:
            scores = torch.cat([scores, scores], dim=-1)[..., filled - 1 - slot : 2 * filled - 1 - slot]
        if scores.is_cuda:
            scores = scores.contiguous()  # torch's kernels require an aligned mask
        attended = F.scaled_dot_product_attention(
            (query + u).unsqueeze(2),
            self.keys[n][:, :, :filled],
            self.values[n][:, :, :filled],
            attn_mask=scores.transpose(0, 1).unsqueeze(2),
            scale=scale,
        )
        return attended.flatten(1)

    def far(self, known: int) -> Float[Tensor, "S"]:
        """The discount of the distances size - 1, ..., known, which share a position key."""
        gap = torch.arange(self.size - 1, known - 1, -1, device=self.keys[0].device)
        return far_discount(gap, known - 1, self.reading.discount).to(self.keys[0].dtype)

    def feed_forward(self, n: int, layer: StepLayer, x: Any) -> Any:  # noqa: ARG002 (`n` is for the fused decoder)
        if layer.pre_norm:
            return x + layer.feed_forward(layer.feed_forward_norm(x))
        return layer.feed_forward_norm(x + layer.feed_forward(x))


_ONE_TOKEN = SegmentMask(0, 1, 1, None, None, None)
"""A segment of one token in a model with memory."""


def attention_of(cache: Any) -> Any:
    """The KeyValueCache of a layer."""
    return cache.attention if isinstance(cache, ConvolutionCache) else cache


def _slots(positions: Float[Tensor, "B H M D"], size: int) -> Float[Tensor, "B H S D"]:
    B, H, _, D = positions.shape
    return positions.new_zeros(B, H, size, D)


def _scaled(layer: StepLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """r as columns, u, and w / sqrt(D)."""
    w = layer.w * layer.w.shape[-1] ** -0.5
    return layer.r.to(dtype).contiguous().transpose(1, 2), layer.u.to(dtype), w.to(dtype)
