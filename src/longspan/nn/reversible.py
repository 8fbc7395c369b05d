"""Reversible layers: training stores only the output of the last layer (Gomez et al. 2017)."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from longspan.nn.whole_batch import divided, division
from longspan.shapes import Float, Tensor

Streams = tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]


class ReversibleLayer(nn.Module):
    """y1 = x1 + f(x2),  y2 = x2 + g(y1);  inverse:  x2 = y2 - g(y1),  x1 = y1 - f(x2).

    f(x, context, plan) returns its output and its plan: an integer tensor with all its discrete decisions, or None. The
    recomputed x has other rounding errors, and with the plan f makes the same decisions again. g(x) works on every
    position separately, so its input can be split into `pieces`.
    """

    def __init__(self, f: nn.Module, g: nn.Module, pieces: int = 1) -> None:
        super().__init__()
        self.f, self.g, self.pieces = f, g, pieces

    def forward(self, x1: Float[Tensor, "B T D"], x2: Float[Tensor, "B T D"], context: Any) -> Streams:
        y1 = x1 + self.f(x2, context, None)[0]
        return y1, x2 + self.in_pieces(y1)

    def in_pieces(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return torch.cat([self.g(piece) for piece in self.split(x)], dim=1)

    def split(self, x: Float[Tensor, "B T D"]) -> Sequence[Tensor]:
        return x.split(-(-x.shape[1] // self.pieces), dim=1)


def run_reversible(
    layers: Sequence[ReversibleLayer],
    x1: Float[Tensor, "B T D"],
    x2: Float[Tensor, "B T D"],
    contexts: Sequence[Any],
) -> Streams:
    """Both streams after all layers. Only these and the plans of the layers are stored for the backward pass."""
    if torch.is_grad_enabled():
        weights = [p for layer in layers for p in (*layer.f.parameters(), *layer.g.parameters())]
        return _Recomputed.apply(layers, contexts, x1, x2, *weights)
    for layer, context in zip(layers, contexts, strict=True):
        x1, x2 = layer(x1, x2, context)
    return x1, x2


class _Recomputed(torch.autograd.Function):
    """The weights are inputs, so that autograd returns their gradients and the backward pass uses the weights of the
    forward pass (weight dropout has replaced those in the module by then)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, layers: Sequence[ReversibleLayer], contexts: Sequence[Any], x1: Tensor, x2: Tensor, *weights: Tensor
    ) -> Streams:
        ctx.layers, ctx.contexts, ctx.randoms, ctx.division = layers, contexts, [], division()
        kind = x1.device.type
        ctx.precision = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        plans = []
        for layer, context in zip(layers, contexts, strict=True):
            before_f = _random_state(x1.device)
            change, plan = layer.f(x2, context, None)
            x1 = x1 + change
            ctx.randoms.append((before_f, _random_state(x1.device)))
            x2 = x2 + layer.in_pieces(x1)
            plans.append(plan)
        ctx.save_for_backward(x1, x2, *plans, *weights)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y1, y2, *rest = ctx.saved_tensors
        plans, weights = rest[: len(ctx.layers)], rest[len(ctx.layers) :]
        gradients: list[Tensor | None] = []
        for layer, context, plan, (before_f, before_g) in zip(
            *(reversed(x) for x in (ctx.layers, ctx.contexts, plans, ctx.randoms)), strict=True
        ):
            g = _HalfLayer(layer.g, weights, ctx.precision)
            with _with_random_state(before_g, y1.device), divided(ctx.division):
                parts = [g(y, d) for y, d in zip(layer.split(y1), layer.split(d2), strict=True)]
            change, d = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
            x2, d1 = y2 - change, d1 + d
            f = _HalfLayer(layer.f, weights, ctx.precision)
            with _with_random_state(before_f, y1.device), divided(ctx.division):
                change, d = f(x2, d1, context, plan)
            y1, y2, d2 = y1 - change, x2, d2 + d
            gradients = [*f.gradients, *g.gradients, *gradients]
        return None, None, d1, d2, *gradients


class _HalfLayer:
    """f or g of a layer, computed again with gradients. It takes its weights from the end of the list."""

    def __init__(self, half: nn.Module, weights: list[Tensor], precision: tuple[str, torch.dtype, bool]) -> None:
        names = [name for name, _ in half.named_parameters()]
        own = [weights.pop() for _ in names][::-1]
        self.half, self.precision = half, precision
        self.weights = {n: w.detach().requires_grad_(w.requires_grad) for n, w in zip(names, own, strict=True)}
        self.gradients: list[Tensor | None] = [None] * len(names)

    def __call__(self, x: Tensor, d: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        """The output for x, and the gradient of x from that of the output, d."""
        kind, dtype, enabled = self.precision
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled):
            change = functional_call(self.half, self.weights, (x, *more))
        change = change[0] if isinstance(change, tuple) else change
        trained = [k for k, weight in enumerate(self.weights.values()) if weight.requires_grad]
        inputs = [x, *(list(self.weights.values())[k] for k in trained)]
        dx, *found = torch.autograd.grad(change, inputs, d.to(change.dtype))
        for k, gradient in zip(trained, found, strict=True):
            held = self.gradients[k]
            self.gradients[k] = gradient if held is None else held + gradient
        return change.detach(), dx


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _with_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Use this state of the random generators within the block."""
    cpu, cuda = state
    with torch.random.fork_rng([] if cuda is None else [device]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
