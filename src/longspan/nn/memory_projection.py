"""Linear maps of [memory; segment] in training, without the gradient of the memory, which nobody uses.

The memory is detached, but weights get a gradient through it. Autograd computes the gradient of all inputs and cuts off
the memory's afterwards; that is half of the work for a memory as long as the segment.
"""

from typing import Any

import torch
from torch.nn import functional as F

from longspan.shapes import Float, Tensor


class _MemoryLinear(torch.autograd.Function):
    """context W^T, where the last T positions of the context are the segment."""

    @staticmethod
    def forward(context: Tensor, segment: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return F.linear(context, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        context, segment, weight = inputs
        ctx.tokens = segment.shape[1]
        ctx.save_for_backward(context, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:  # type: ignore[override]
        context, weight = ctx.saved_tensors
        of_weight = grad.flatten(0, 1).t() @ context.flatten(0, 1)
        # One product per row of the batch: the segments are not contiguous, and a copy costs as much as it saves.
        of_segment = torch.bmm(grad[:, -ctx.tokens :], weight.expand(len(grad), -1, -1))
        return None, of_segment, of_weight


def memory_context(memory: Float[Tensor, "B M E"], segment: Float[Tensor, "B T E"]) -> Float[Tensor, "B K E"]:
    """[memory; segment] in the dtype of matrix products, without gradient."""
    return torch.cat([memory.detach().to(segment.dtype), segment.detach()], dim=1)


def memory_linear(
    context: Float[Tensor, "B K E"], segment: Float[Tensor, "B T E"], weight: Float[Tensor, "F E"]
) -> Float[Tensor, "B K F"]:
    """The context (of `memory_context`) times W^T, with gradients of the segment and of W."""
    with torch.autocast(segment.device.type, enabled=False):
        return _MemoryLinear.apply(context, segment, weight.to(segment.dtype))


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast multiplies matrices."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
