"""RMS norm of every head in one pass, forward and backward; a compiler splits each into several.

The definition is `HeadNorm` in nn/attention.py. All sums have a fixed order.
"""

# ruff: noqa: ARG001 (fake implementations of custom operations take all arguments)

from typing import Any

import torch

from longspan.shapes import Float, Tensor

ROWS = 64
PROGRAMS = 1056
"""Of the backward pass: eight for each of the 132 multiprocessors of an H200."""


def head_norm(x: Float[Tensor, "... E"], gain: Float[Tensor, "D"], eps: float) -> Float[Tensor, "... E"]:
    """gain x / sqrt(mean(x^2) + eps) for every D neighbours, computed in float32, in the dtype of x."""
    return _forward(x, gain, eps)


@torch.library.custom_op("longspan::head_norm", mutates_args=())
def _forward(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    from longspan.kernels.head_norm.kernels import forward_kernel

    x, D, rows = x.contiguous(), gain.shape[0], block_rows(x)
    R, out = x.numel() // D, torch.empty_like(x)
    forward_kernel[(-(-R // rows),)](x, gain, out, R, eps, D=D, BD=padded(D), ROWS=rows, num_warps=4)
    return out


@torch.library.custom_op("longspan::head_norm_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from longspan.kernels.head_norm.kernels import backward_kernel

    grad, x, D, rows = grad.contiguous(), x.contiguous(), gain.shape[0], block_rows(x)
    R, out = x.numel() // D, torch.empty_like(x)
    programs = min(PROGRAMS, -(-R // rows))
    partial = x.new_empty(programs, D, dtype=torch.float32)
    backward_kernel[(programs,)](
        grad, x, gain, out, partial, R, eps, D=D, BD=padded(D), ROWS=rows, num_warps=4
    )  # fmt: skip
    return out, partial.sum(0).to(gain.dtype)


def block_rows(x: Tensor) -> int:
    return ROWS if x.is_cuda else 4


def padded(D: int) -> int:
    return 1 << (D - 1).bit_length()


@_forward.register_fake
def _(x, gain, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@_backward.register_fake
def _(grad, x, gain, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), torch.empty_like(gain)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, gain, ctx.eps = inputs
    ctx.save_for_backward(x, gain)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.eps), None


_forward.register_autograd(_differentiate, setup_context=_save)
