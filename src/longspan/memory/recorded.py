"""A one-token step recorded once and replayed (CUDA graphs): one launch per token, and nothing allocated."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from longspan.contract import State
from longspan.kernels import one_token
from longspan.kernels.one_token import Norm
from longspan.kernels.relative_attention import TRITON_WORKS
from longspan.memory.recording import record, run_aside
from longspan.memory.ring import Reader, Ring, joined_projections
from longspan.shapes import Float, Int, Tensor


def can_record(model: Any) -> bool:
    """Whether this model's steps can be recorded where it lies."""
    like = next(model.parameters())
    return (
        like.is_cuda
        and TRITON_WORKS
        and like.dtype in (torch.bfloat16, torch.float32)
        and model.config.activation in one_token.ACTIVATIONS
        and max(model.config.width, model.config.inner_size) <= one_token.WIDEST
    )


class RecordedDecoder(Ring):
    """A ring whose step is recorded at its first token.

    A post-norm layer ends in a norm that only its readers need: it is left to them, so a layer's output travels as a
    tensor and the norm that is still to be taken of it. What `step` returns is overwritten by the next step.
    """

    def __init__(self, model: Reader, state: State, age: int) -> None:
        like = model.embedding.tables[0]
        self.count = torch.zeros((), dtype=torch.int64, device=like.device)  # the device's own `written`
        super().__init__(model, state, age)
        c, B = model.config, state.batch

        def room(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=like.device)

        self.tokens = torch.zeros(B, dtype=torch.int64, device=like.device)
        self.qkv = room(B, 3, c.heads, c.head_size)
        self.read_out = room(B, c.heads, c.head_size)
        self.sums, self.outs = room(c.layers, B, c.width), room(c.layers, B, c.width)
        self.inner = room(B, c.inner_size)
        self.partial = room(*one_token.partial_size(B * c.heads, self.size, c.head_size), dtype=torch.float32)
        with torch.no_grad():
            position = model.positions(self.size)
            self.positions = [[p.to(like.dtype).contiguous() for p in position(layer)] for layer in model.layers]
            self.qkv_weights = [joined_projections(layer.attention) for layer in model.layers]
            norms = [(layer.attention.query_norm, layer.attention.key_norm) for layer in model.layers if c.qk_norm]
            self.head_norms = [(torch.stack([q.weight, k.weight])[:, None], q.eps) for q, k in norms]
            # c_N, ..., c_1 and 1: what a tail and the token after it are multiplied by.
            self.taps = [F.pad(mixer.weight.flip(0), (0, 0, 0, 1), value=1.0) for mixer in model.convolutions]
        self.graphs: dict[Any, Any] = {}

    def fill(self, state: State, age: int) -> None:
        super().fill(state, age)
        self.count.fill_(self.written)

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.tokens.copy_(tokens)
        if "step" not in self.graphs:
            self.graphs["step"] = self._record(self._logits)
        self.graphs["step"].replay()
        self.advance()
        return self.logits

    def chooser(
        self, choose: Callable[[Tensor], Tensor], generator: torch.Generator, key: Any
    ) -> Callable[[Int[Tensor, "B"]], Int[Tensor, "B"]]:
        """A step and the choice of the next token as one recording, which equal keys share."""

        @torch.no_grad()
        def next_token(tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
            if tokens is not self.tokens:
                self.tokens.copy_(tokens)
            if key not in self.graphs:
                self.graphs[key] = self._record(lambda: self.tokens.copy_(choose(self.compute())), generator)
            self.graphs[key].replay()
            self.advance()
            return self.tokens

        return next_token

    def _record(self, work: Callable[[], Any], generator: torch.Generator | None = None) -> Any:
        tokens, random = self.tokens.clone(), generator.get_state() if generator else None
        tails = [tail.clone() for tail in self.tails]
        run_aside(work)  # it writes the slot that the step itself is about to write
        self.tokens.copy_(tokens)
        for tail, before in zip(self.tails, tails, strict=True):
            tail.copy_(before)
        if generator is not None and random is not None:
            generator.set_state(random)

        def step() -> None:
            work()
            self.count.add_(1)

        return record(step, generator)

    def _logits(self) -> None:
        self.logits = self.compute()

    def compute(self) -> Float[Tensor, "B V"]:
        """Logits of the token after `tokens`, whose keys and values go to their slot."""
        B, before = self.tokens.shape[0], self.model.config.norm == "pre"
        x, pending = self.model.embedding(self.tokens[:, None])[:, 0], None
        for n, layer in enumerate(self.model.layers):
            attention_norm = Norm.of(layer.attention_residual.norm)
            feed_forward_norm = Norm.of(layer.feed_forward_residual.norm)
            attention, feed_forward = layer.attention, layer.feed_forward
            if self.tails:
                x, pending = self._mix(n, x if pending is None else self._normed(n - 1, x)), None
            one_token.linear(
                x, self.qkv_weights[n], None, self.qkv.view(B, -1), norm=attention_norm if before else pending
            )
            if self.head_norms:
                self._norm_heads(n)
            r, u, w = self.positions[n]
            one_token.ring_attention(
                self.qkv, self.keys[n], self.values[n], r, u, w, self.count, self.partial, self.read_out
            )
            one_token.linear(
                self.read_out.view(B, -1),
                attention.output.weight,
                None,
                self.sums[n],
                residual=x,
                residual_norm=None if before else pending,
            )
            one_token.linear(
                self.sums[n],
                feed_forward.up.weight,
                feed_forward.up.bias,
                self.inner,
                norm=feed_forward_norm if before else attention_norm,
                activation=self.model.config.activation,
            )
            one_token.linear(
                self.inner,
                feed_forward.down.weight,
                feed_forward.down.bias,
                self.outs[n],
                residual=self.sums[n],
                residual_norm=None if before else attention_norm,
            )
            x, pending = self.outs[n], None if before else feed_forward_norm
        if pending is not None:
            x = self._normed(-1, x)
        return self.model.head.logits(self.model.final_norm(x)[:, None])[:, -1]

    def _normed(self, layer: int, x: Float[Tensor, "B E"]) -> Float[Tensor, "B E"]:
        """A post-norm layer's output with the norm that was left to its readers."""
        return self.model.layers[layer].feed_forward_residual.norm(x)

    def _norm_heads(self, layer: int) -> None:
        """The norms of queries and keys, where these lie."""
        both, (gains, eps) = self.qkv[:, :2], self.head_norms[layer]
        both.copy_(F.rms_norm(both, both.shape[-1:], eps=eps) * gains)

    def _mix(self, layer: int, x: Float[Tensor, "B E"]) -> Float[Tensor, "B E"]:
        """What the layer's convolution makes of its input, which joins the tail: `memory.tails.mix` in four launches,
        however many taps."""
        line = torch.cat([self.tails[layer], x[:, None]], dim=1)
        self.tails[layer].copy_(line[:, 1:])
        return (line * self.taps[layer]).sum(dim=1)
