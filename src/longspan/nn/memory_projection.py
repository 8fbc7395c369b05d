"""Linear maps of [memory; segment] in training, without the gradient of the memory, which nobody uses.

The memory is detached, but weights get a gradient through it. Autograd computes the gradient of all inputs and cuts off
the memory's afterwards; that is half of the work for a memory as long as the segment. These are custom operations and
not an autograd function, because torch's compile cache does not store graphs with the latter.
"""

# ruff: noqa: ARG001 (operations take arguments for their gradient only)

from typing import Any

import torch
from torch.nn import functional as F

from longspan.shapes import Float, Tensor


@torch.library.custom_op("longspan::memory_linear", mutates_args=())
def _linear(context: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    """context W^T, where the last positions of the context are those of the segment."""
    return F.linear(context, weight)


@torch.library.custom_op("longspan::memory_linear_backward", mutates_args=())
def _backward(grad: Tensor, context: Tensor, weight: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    # One product per row of the batch: the segments are not contiguous, and a copy costs as much as it saves.
    of_segment = torch.bmm(grad[:, -tokens:], weight.expand(len(grad), -1, -1))
    return of_segment, grad.flatten(0, 1).t() @ context.flatten(0, 1)


@_linear.register_fake
def _(context, segment, weight):  # type: ignore[no-untyped-def]
    return context.new_empty(*context.shape[:2], weight.shape[0])


@_backward.register_fake
def _(grad, context, weight, tokens):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape[0], tokens, weight.shape[1]), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    context, segment, weight = inputs
    ctx.tokens = segment.shape[1]
    ctx.save_for_backward(context, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
    return None, *_backward(grad, *ctx.saved_tensors, ctx.tokens)


_linear.register_autograd(_differentiate, setup_context=_save)


def memory_context(memory: Float[Tensor, "B M E"], segment: Float[Tensor, "B T E"]) -> Float[Tensor, "B K E"]:
    """[memory; segment] in the dtype of matrix products, without gradient."""
    return torch.cat([memory.detach().to(segment.dtype), segment.detach()], dim=1)


def memory_linear(
    context: Float[Tensor, "B K E"], segment: Float[Tensor, "B T E"], weight: Float[Tensor, "F E"]
) -> Float[Tensor, "B K F"]:
    """The context (of `memory_context`) times W^T, with gradients of the segment and of W."""
    return _linear(context, segment, weight.to(segment.dtype))


def memory_products(
    memory: Float[Tensor, "B M E"], segment: Float[Tensor, "B T E"], *weights: Float[Tensor, "F E"]
) -> tuple[Float[Tensor, "B K F"], ...]:
    """[memory; segment] times each W^T, without a gradient of the memory."""
    segment = segment.to(product_dtype(segment))
    context = memory_context(memory, segment)
    return tuple(memory_linear(context, segment, weight) for weight in weights)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast multiplies matrices."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
