"""Launches of the kernel that computes a complete step of one row."""

from dataclasses import dataclass
from typing import Any

import torch

from longspan.kernels.one_token import ACTIVATIONS, Norm, kind_of, power
from longspan.shapes import Int, Tensor

PHASES = 6
"""Per layer: projections, parts of the attention, their sum, its output, and the two products of the feed-forward
layer."""
HEAD = 1 << PHASES
ALL = 2 * HEAD - 1
ENTRIES = 17
TILE = 32768
"""The most weights that a program holds in its registers."""
SLOTS = 128
WARPS = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and how its work is divided."""

    vocabulary: int
    width: int
    heads: int
    head_width: int
    inner: int
    layers: int
    slots: int
    programs: int

    @property
    def splits(self) -> int:
        """Programs per head."""
        return self.programs // self.heads

    @property
    def chunk(self) -> int:
        """Slots per program."""
        return -(-self.slots // self.splits)

    def rows(self, columns: int) -> int:
        """Outputs per program, for a product with this many."""
        return 1 << max(0, (-(-columns // self.programs) - 1).bit_length())

    def fits(self) -> bool:
        """Whether the programs can hold all tiles."""
        if self.heads > self.programs:
            return False
        inside = self.heads * self.head_width
        products = ((3 * inside, self.width), (self.width, inside), (self.inner, self.width), (self.width, self.inner))
        return all(self.rows(n) * power(k) <= TILE for n, k in (*products, (self.vocabulary, self.width))) and (
            power(self.splits) * power(inside) <= TILE
        )


@dataclass(frozen=True, eq=False)
class Weights:
    """What all layers share."""

    embedding: Tensor
    embedding_scale: float
    head: Tensor
    head_bias: Tensor
    final_norm: Norm | None
    temperature: float
    table: Int[Tensor, "N 17"]
    """Addresses of the tensors of each layer."""
    distances: int
    pre_norm: bool
    norm: Norm
    """A norm of a layer: all have its kind and epsilon."""
    head_eps: float | None
    biases: bool
    activation: str | None
    discount: float


class Buffers:
    """What the phases give to each other."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        inside = shape.heads * shape.head_width
        # Per layer: queries, keys and values; parts of the attention, with two numbers per head; the attention; and the
        # sums after it, inside and after the feed-forward layer.
        words = 3 * inside + shape.splits * (inside + 2 * shape.heads) + inside + 2 * shape.width + shape.inner
        self.logits = torch.zeros(1, shape.vocabulary, device=device)
        self.boxes = torch.zeros(shape.layers * words, dtype=torch.int64, device=device)
        """Words of a value and the number of the step that wrote it."""
        self.epochs = torch.zeros(shape.programs, dtype=torch.int64, device=device)
        """Steps so far. One per program, because a slow one may read its own after a fast one has finished."""
        self.failed = torch.zeros((), dtype=torch.int32, device=device)
        """Whether a program gave up to wait for others."""


def step(
    shape: Shape, weights: Weights, buffers: Buffers, tokens: Int[Tensor, "1"], count: Tensor, *, persistent: bool
) -> None:
    """Logits of the next token in `buffers.logits`; `count`, the number of earlier tokens, is increased. Persistent:
    one launch, for which all programs must be resident at the same time. Otherwise one launch per phase."""
    if persistent:
        _launch(shape, weights, buffers, tokens, count, 0, shape.layers, ALL)
        return
    for n in range(shape.layers):
        for phase in range(PHASES):
            _launch(shape, weights, buffers, tokens, count, n, n + 1, 1 << phase)
    _launch(shape, weights, buffers, tokens, count, 0, 0, HEAD)


def _launch(
    shape: Shape,
    weights: Weights,
    buffers: Buffers,
    tokens: Tensor,
    count: Tensor,
    first: int,
    last: int,
    phases: int,
) -> None:
    from longspan.kernels.one_token.persistent_kernel import step_kernel

    final = weights.final_norm
    options: dict[str, Any] = {"launch_cooperative_grid": True} if phases == ALL else {}
    step_kernel[(shape.programs,)](
        tokens, weights.embedding, weights.head, weights.head_bias, final and final.gain, final and final.shift,
        weights.table, buffers.logits, buffers.boxes, count, buffers.epochs, buffers.failed, shape.slots,
        weights.distances, shape.chunk, first, last, weights.embedding_scale, 1 / weights.temperature,
        weights.norm.eps, final.eps if final else 0.0, weights.head_eps or 0.0,
        shape.head_width**-0.5, weights.discount, **constants(shape, weights), PHASES=phases, num_warps=WARPS,
        **options,
    )  # fmt: skip


def constants(shape: Shape, weights: Weights) -> dict[str, Any]:
    """The compile-time arguments of the kernel, without those of a launch."""
    inside, head_width = shape.heads * shape.head_width, power(shape.head_width)
    most = SLOTS if weights.head.dtype == torch.bfloat16 else SLOTS // 2
    return {
        "V": shape.vocabulary,
        "E": shape.width,
        "BE": power(shape.width),
        "H": shape.heads,
        "D": shape.head_width,
        "BD": head_width,
        "BI": power(inside),
        "F": shape.inner,
        "BF": power(shape.inner),
        "LAYERS": shape.layers,
        "SPLITS": shape.splits,
        "PADDED": max(2, 1 << (shape.splits - 1).bit_length()),
        "SLOTS": min(power(shape.chunk), max(16, most * 64 // head_width)),
        "QKV_ROWS": shape.rows(3 * inside),
        "I_ROWS": shape.rows(inside),
        "E_ROWS": shape.rows(shape.width),
        "F_ROWS": shape.rows(shape.inner),
        "V_ROWS": shape.rows(shape.vocabulary),
        "PRE": weights.pre_norm,
        "KIND": kind_of(weights.norm),
        "FINAL": kind_of(weights.final_norm),
        "HEAD_NORM": weights.head_eps is not None,
        "BIAS": weights.biases,
        "ACTIVATION": ACTIVATIONS[weights.activation],
        "DISCOUNT": weights.discount > 0.0 and shape.slots > weights.distances,
    }
