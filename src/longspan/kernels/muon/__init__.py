"""A Muon step in few passes over memory, for float32 weights on a GPU.

    m <- lerp(m, g, 1 - momentum)    x = lerp(g, m, momentum)                      one pass, x in bfloat16
    A = x x^T    B = b A + c A^2    x <- a x + B x                                 five times
    w <- w - lr (sqrt(max(1, rows / columns)) x + decay w)                         with the last product

A and B are symmetric, so only tiles on and above the diagonal are computed. The norm of x comes from the sums of
squares of the first pass and is applied to A and to the first new x. The definition is `Muon` in
training/optimizers.py. All sums have a fixed order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longspan.kernels.address_table import addresses
from longspan.shapes import Float, Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape, with their gradients and momenta. A tall matrix has more rows than columns."""

    weights: Sequence[Float[Tensor, "R C"]]
    gradients: Sequence[Float[Tensor, "R C"]]
    momenta: Float[Tensor, "N R C"]

    @property
    def tall(self) -> bool:
        return self.momenta.shape[1] > self.momenta.shape[2]


@dataclass(frozen=True)
class Launch:
    """Tiles of the products: T rows, `columns` of the product with x, `inner` per step of the sum. The update needs
    registers for weights as well, so its tiles are narrower."""

    T: int = 128
    columns: int = 128
    update_columns: int = 64
    inner: int = 64
    pass_tile: int = 64
    num_warps: int = 8
    num_stages: int = 3
    registers: int | None = 128
    """Per thread; 128 let two programs of 8 warps share a multiprocessor."""


GPU, INTERPRETER = Launch(), Launch(32, 32, 32, 32, 32, 4, 1, None)
SMALLEST = 64
"""Narrower matrices than this are faster with the plain code."""


def step(
    batches: Sequence[Batch],
    *,
    lr: Float[Tensor, ""],
    momentum: float,
    decay: float,
    blocked: Float[Tensor, ""],
    dtype: torch.dtype = torch.bfloat16,
    launch: Launch | None = None,
) -> None:
    """One step of Muon in place, or none if `blocked` is not 0. Products are in `dtype`.

    A matrix and a transposed one share a batch of products.
    """
    shapes: dict[tuple[int, int], list[Batch]] = {}
    for batch in batches:
        _, rows, columns = batch.momenta.shape
        shapes.setdefault((min(rows, columns), max(rows, columns)), []).append(batch)
    for (rows, columns), here in shapes.items():
        how = launch or (GPU if lr.is_cuda else INTERPRETER)
        products = _Products(here, rows, columns, lr, dtype, how)
        products.add_momentum(momentum, blocked)
        for k in range(STEPS):
            products.make_polynomial(first=k == 0)
            if k < STEPS - 1:
                products.apply(first=k == 0)
        products.apply_to_weights(blocked, lr, decay)


class _Products:
    """Buffers and launches for matrices of R rows and C >= R columns. Tall matrices are stored transposed."""

    def __init__(self, batches: list[Batch], R: int, C: int, like: Tensor, dtype: torch.dtype, how: Launch) -> None:
        self.batches, self.R, self.C, self.how = batches, R, C, how
        self.counts = [len(batch.weights) for batch in batches]
        self.N = sum(self.counts)
        self.parts = -(-R // how.pass_tile) * -(-C // how.pass_tile)
        self.x, self.next = (like.new_empty(self.N, R, C, dtype=dtype) for _ in range(2))
        self.gram, self.polynomial = (like.new_empty(self.N, R, R, dtype=dtype) for _ in range(2))
        self.sums = like.new_empty(self.N, self.parts, dtype=torch.float32)
        self.options: dict[str, Any] = {"T": how.T, "BK": how.inner, "num_warps": how.num_warps}
        self.options |= {"num_stages": how.num_stages, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
        if how.registers is not None:
            self.options["maxnreg"] = how.registers
        self.down = -(-R // how.T)

    def split(self, *buffers: Tensor) -> Iterator[tuple[Any, ...]]:
        """Every batch with its slices of the buffers."""
        return zip(self.batches, *(buffer.split(self.counts) for buffer in buffers), strict=True)

    def add_momentum(self, momentum: float, blocked: Tensor) -> None:
        from longspan.kernels.muon.kernels import momentum_kernel

        tile = self.how.pass_tile
        for batch, x, sums in self.split(self.x, self.sums):
            momentum_kernel[(self.parts, len(batch.weights))](
                addresses(batch.gradients), batch.momenta, x, sums, blocked, momentum, *batch.momenta.shape[1:],
                T=tile, TALL=batch.tall, EVEN=self.R % tile == self.C % tile == 0, num_warps=4,
            )  # fmt: skip

    def make_polynomial(self, *, first: bool) -> None:
        """b A + c A^2 with A = x x^T. At first, x is not divided by its norm yet."""
        from longspan.kernels.muon.kernels import symmetric_kernel

        _, b, c = NEWTON_SCHULZ
        R, C, how = self.R, self.C, self.how
        even, grid = R % how.T == R % how.inner == 0, (self.down * (self.down + 1) // 2, self.N)
        wide = {"ADD": False, "EVEN": even and C % how.inner == 0, **self.scaling(first), **self.options}
        symmetric_kernel[grid](self.x, self.gram, self.sums, 1.0, 0.0, R, C, **wide)
        square = {"ADD": True, "EVEN": even, **self.scaling(False), **self.options}
        symmetric_kernel[grid](self.gram, self.polynomial, self.sums, c, b, R, R, **square)

    def scaling(self, first: bool) -> dict[str, int]:
        return (
            {"PARTS": self.parts, "PADDED": 1 << (self.parts - 1).bit_length()} if first else {"PARTS": 0, "PADDED": 1}
        )

    def apply(self, *, first: bool) -> None:
        """x <- a x + polynomial x."""
        update = (None, None, None, 0.0, 0.0)
        self._apply(self.N, self.polynomial, self.x, self.next, self.sums, *update, first=first, tall=False)
        self.x, self.next = self.next, self.x

    def apply_to_weights(self, blocked: Tensor, lr: Tensor, decay: float) -> None:
        for batch, polynomial, x, sums in self.split(self.polynomial, self.x, self.sums):
            _, rows, columns = batch.momenta.shape
            update = (addresses(batch.weights), blocked, lr, max(1.0, rows / columns) ** 0.5, decay)
            self._apply(len(batch.weights), polynomial, x, None, sums, *update, first=False, tall=batch.tall)

    def _apply(
        self,
        count: int,
        polynomial: Tensor,
        x: Tensor,
        out: Tensor | None,
        sums: Tensor,
        *update: Any,
        first: bool,
        tall: bool,
    ) -> None:
        from longspan.kernels.muon.kernels import apply_kernel

        R, C, how = self.R, self.C, self.how
        width = how.update_columns if out is None else how.columns
        even = R % how.T == R % how.inner == C % width == 0
        apply_kernel[(self.down * -(-C // width), count)](
            polynomial, x, out, sums, NEWTON_SCHULZ[0], R, C, *update,
            BN=width, EVEN=even, UPDATE=out is None, TALL=tall, **self.scaling(first), **self.options,
        )  # fmt: skip
