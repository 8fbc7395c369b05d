"""The rolling decoder with fused Triton kernels: five launches per layer, each weight read once, no allocation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from longspan.contract import LanguageModel, State
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.step_layers import StepLayer
from longspan.kernels import one_token
from longspan.kernels.one_token import Norm
from longspan.kernels.triton_works import TRITON_WORKS
from longspan.nn.adaptive_softmax import AdaptiveSoftmax
from longspan.shapes import Float, Int, Tensor


class Deferred(NamedTuple):
    """A layer's output before its norm, and that norm. The kernel that reads the output applies it."""

    x: Float[Tensor, "B E"]
    norm: Any = None
    """The norm module, or None if `x` needs none."""

    @property
    def kernel_norm(self) -> Norm | None:
        return None if self.norm is None else Norm.of(self.norm)


class FusedDecoder(RollingDecoder):
    """Buffers are allocated once and the number of written slots is on the device, so a step is static."""

    static = True

    @staticmethod
    def supports(model: LanguageModel, layers: Sequence[StepLayer]) -> bool:
        like, c = next(model.parameters()), model.config
        return (
            like.is_cuda
            and TRITON_WORKS
            and like.dtype in (torch.bfloat16, torch.float32)
            and layers[0].up is not None
            and layers[0].activation in one_token.ACTIVATIONS
            and max(c.width, c.inner_size) <= one_token.WIDEST
        )

    def __init__(self, model: LanguageModel, state: State, layers: Sequence[StepLayer], age: int) -> None:
        like = layers[0].qkv
        self.count = torch.zeros((), dtype=torch.int64, device=like.device)  # `written`, on the device
        super().__init__(model, state, layers, age)
        c, B = model.config, state.batch

        def buffer(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=like.device)

        self.qkv = buffer(B, 3, c.heads, c.head_size)
        self.attended = buffer(B, c.heads, c.head_size)
        self.sums, self.outs = buffer(c.layers, B, c.width), buffer(c.layers, B, c.width)
        self.inner = buffer(B, c.inner_size)
        self.scratch = one_token.Scratch.of(B, c.width, like.device)
        self.partial = buffer(*one_token.partial_size(B * c.heads, self.size, c.head_size), dtype=torch.float32)
        # Without clusters and projections the head is one more product.
        self.logits = buffer(B, c.vocabulary, dtype=torch.float32) if plain_softmax(model) else None
        with torch.no_grad():
            self.tables = [[p.to(like.dtype).contiguous() for p in (n.r, n.u, n.w)] for n in layers]
            both = [layer.head_norms for layer in layers if layer.head_norms]
            self.head_gains = [(torch.stack([q.weight, k.weight])[:, None], q.eps) for q, k in both]
            # c_N, ..., c_1 and 1: the factors of the last N inputs and of the newest token.
            taps = [layer.convolution.weight for layer in layers if layer.convolution is not None]
            self.taps = [F.pad(weight.flip(0), (0, 0, 0, 1), value=1.0) for weight in taps]

    def load(self, state: State, age: int) -> None:
        super().load(state, age)
        self.count.fill_(self.written)

    def undo(self) -> None:
        super().undo()
        self.count.sub_(1)

    def buffers(self) -> list[Tensor]:
        # Without keys and values: a repeated step writes the same slot again.
        return [self.count, *self.history]

    @torch.no_grad()
    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits = self.compute(tokens)
        self.count.add_(1)
        return logits

    def finish(self, x: Any) -> Float[Tensor, "B E"]:
        value, norm = x
        return value if norm is None else norm(value)

    def output(self, x: Any) -> Float[Tensor, "B V"]:
        norms = [norm for norm in (x.kernel_norm, Norm.of(self.final_norm)) if norm is not None]
        if self.logits is None or len(norms) > 1:
            return super().output(x)
        head = self.model.head
        one_token.linear(x.x, head.tables[0], head.biases[0], self.logits, norm=norms[0] if norms else None)
        return self.logits if self.reading.temperature == 1 else self.logits / self.reading.temperature

    def convolve(self, n: int, layer: StepLayer, x: Any) -> Any:  # noqa: ARG002
        inputs = torch.cat([self.inputs[n], self.finish(_deferred(x))[:, None]], dim=1)
        self.history[n].copy_(inputs)
        return Deferred((inputs * self.taps[n]).sum(dim=1))

    def attention(self, n: int, layer: StepLayer, x: Any) -> Deferred:
        x, B = _deferred(x), self.qkv.shape[0]
        norm = Norm.of(layer.attention_norm) if layer.pre_norm else x.kernel_norm
        one_token.linear(x.x, layer.qkv, None, self.qkv.view(B, -1), norm=norm)
        if layer.head_norms:
            queries_keys, (gains, eps) = self.qkv[:, :2], self.head_gains[n]
            queries_keys.copy_(F.rms_norm(queries_keys, queries_keys.shape[-1:], eps=eps) * gains)
        r, u, w = self.tables[n]
        one_token.rolling_attention(
            self.qkv, self.keys[n], self.values[n], r, u, w, self.count, self.partial, self.attended,
            self.reading.discount,
        )  # fmt: skip
        one_token.linear(
            self.attended.view(B, -1), layer.output, None, self.sums[n], residual=x.x, residual_norm=x.kernel_norm
        )
        return Deferred(self.sums[n], None if layer.pre_norm else layer.attention_norm)

    def feed_forward(self, n: int, layer: StepLayer, x: Any) -> Deferred:
        assert layer.up is not None
        assert layer.down is not None
        one_token.linear(
            x.x,
            layer.up.weight,
            layer.up.bias,
            self.inner,
            norm=Norm.of(layer.feed_forward_norm) if layer.pre_norm else x.kernel_norm,
            activation=layer.activation,
        )
        one_token.linear(
            self.inner,
            layer.down.weight,
            layer.down.bias,
            self.outs[n],
            residual=x.x,
            residual_norm=x.kernel_norm,
            scratch=self.scratch,
        )
        return Deferred(self.outs[n], None if layer.pre_norm else layer.feed_forward_norm)


def plain_softmax(model: Any) -> bool:
    """Whether the embedding is one table and the head one product."""
    head, embedding = model.head, model.embedding
    return (
        isinstance(head, AdaptiveSoftmax)
        and len(head.clusters) == len(embedding.edges) == 1
        and not len(head.projections)
        and not len(embedding.projections)
    )


def _deferred(x: Any) -> Deferred:
    return x if isinstance(x, Deferred) else Deferred(x)
