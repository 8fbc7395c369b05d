"""The update of dynamic evaluation in one pass over weights, gradients and squares.

    s <- s + g^2        w <- w + decay (w_0 - w) - rate g / (sqrt(s / steps) + epsilon)

The definition is `Learner.update` in scoring/dynamic.py.
"""

from collections.abc import Sequence

import torch

from longspan.kernels.address_table import addresses
from longspan.kernels.triton_works import TRITON_WORKS
from longspan.shapes import Float, Tensor

BLOCK, WARPS = 1024, 8
"""Four numbers per thread: 32 registers, so that a multiprocessor is full of threads that wait for memory."""


class RMSUpdate:
    """Updates of the same float32 weights in place, all of them in one launch.

    A weight may have a bfloat16 copy in `rounded`. It is updated too, and the gradient of that weight is bfloat16.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        original: Sequence[Tensor],
        squares: Sequence[Tensor],
        rounded: Sequence[Tensor | None] = (),
    ) -> None:
        self.weights, self.original, self.squares = list(weights), list(original), list(squares)
        self.rounded = list(rounded) or [None] * len(self.weights)
        device = self.weights[0].device
        self.copies = torch.tensor([0 if c is None else c.data_ptr() for c in self.rounded], device=device)
        blocks = [(k, first) for k, w in enumerate(self.weights) for first in range(0, w.numel(), BLOCK)]
        self.tensor_of, self.first_of = torch.tensor(blocks, device=device).T.contiguous()
        self.sizes = torch.tensor([w.numel() for w in self.weights], device=device)
        self.tables = [addresses(some) for some in (self.weights, self.original, self.squares)]

    @staticmethod
    def suits(weights: Sequence[Tensor]) -> bool:
        """Whether the kernel can be used: contiguous float32 weights on a CUDA device."""
        return TRITON_WORKS and all(w.is_cuda and w.dtype == torch.float32 and w.is_contiguous() for w in weights)

    def __call__(
        self,
        gradients: Sequence[Tensor],
        steps: Float[Tensor, ""],
        rate: float,
        decay: float,
        epsilon: float,
    ) -> None:
        from longspan.kernels.rms_update.kernels import update_kernel

        gradients = [gradient.contiguous() for gradient in gradients]
        weights, original, squares = self.tables
        update_kernel[(len(self.tensor_of),)](
            weights, addresses(gradients), original, squares, self.copies,
            self.tensor_of, self.first_of, self.sizes, steps, rate, decay, epsilon,
            BLOCK=BLOCK, DECAY=decay != 0.0, num_warps=WARPS,
        )  # fmt: skip
