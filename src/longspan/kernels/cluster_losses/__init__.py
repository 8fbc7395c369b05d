"""Cross-entropy of an adaptive softmax with static shapes and without all logits in memory.

`chunked_losses` is for a table that every token is scored against: scores of a chunk of tokens at a time, computed
again in the backward pass. `cluster_losses` is for a cluster that few tokens belong to, chosen on the device: scores
never leave a tile. The definition is `AdaptiveSoftmax.losses` in nn/adaptive_softmax.py. All sums have a fixed order
except the gradient of the hidden states in `cluster_losses`, which uses float32 atomics.
"""

# ruff: noqa: ARG001 (fake implementations of custom operations take all arguments)

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from longspan.shapes import Bool, Float, Int, Tensor

CHUNK_SCORES = 2**27
"""Scores of a chunk: 256 MB in bfloat16."""
ALIGNED = 64


@dataclass(frozen=True)
class Launch:
    """Tiles of tokens, entries and units; parts of the table that are scored in parallel."""

    tokens: int
    entries: int
    inner: int
    units: int
    splits: int
    num_warps: int


def forward_launch(hidden: Tensor) -> Launch:
    if not hidden.is_cuda:
        return Launch(16, 16, 16, 16, 2, 4)
    wide = 128 if hidden.element_size() == 2 else 64
    return Launch(wide, wide, 64 if hidden.element_size() == 2 else 32, 0, 16, 8)


def backward_launch(hidden: Tensor) -> Launch:
    if not hidden.is_cuda:
        return Launch(16, 16, 16, 16, 2, 4)
    units = min(256 if hidden.element_size() == 2 else 64, padded(hidden.shape[1]))
    return Launch(64, 64, 64 if hidden.element_size() == 2 else 32, units, 16, 8 if units > 64 else 4)


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def cluster_losses(
    hidden: Float[Tensor, "N D"],
    table: Float[Tensor, "V D"],
    bias: Float[Tensor, "V"],
    targets: Int[Tensor, "N"],
    here: Bool[Tensor, "N"],
    temperature: float = 1.0,
) -> Float[Tensor, "N"]:
    """The loss of every token of a cluster among the entries of its table, and 0 for all others.

    `here` marks the tokens of the cluster. Their targets are entries of the table; other targets are not read.
    """
    N = targets.shape[0]
    # The numbers of the cluster's tokens come first; the rest of `order` is never read.
    place = torch.where(here, here.cumsum(0) - 1, N)
    order = torch.zeros(N + 1, dtype=torch.int32, device=targets.device)
    order = order.scatter(0, place, torch.arange(N, dtype=torch.int32, device=targets.device))
    count = here.sum(dtype=torch.int32)
    return _cluster(hidden, table, bias, targets, here, order, count, 1.0 / temperature)[0]


@torch.library.custom_op("longspan::cluster_losses", mutates_args=())
def _cluster(
    hidden: Tensor,
    table: Tensor,
    bias: Tensor,
    targets: Tensor,
    here: Tensor,
    order: Tensor,
    count: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from longspan.kernels.cluster_losses.kernels import losses_kernel

    hidden, table = hidden.contiguous(), table.contiguous()
    (N, D), V, how = hidden.shape, table.shape[0], forward_launch(hidden)
    maxima, sums, chosen = hidden.new_empty(3, how.splits, N, dtype=torch.float32).unbind()
    losses_kernel[(-(-N // how.tokens), how.splits)](
        hidden, table, bias, order, count, targets, maxima, sums, chosen, scale, N, V, D, part(V, how),
        BM=how.tokens, BN=how.entries, **common(hidden, how),
    )  # fmt: skip
    most = maxima.amax(0)
    compact = most + (sums * (maxima - most).exp()).sum(0).log()
    # From positions in `order` back to tokens. Other tokens take some position's value, which `where` removes.
    place = torch.where(here, here.cumsum(0) - 1, 0)
    lse = torch.where(here, compact[place], 0.0)
    return torch.where(here, lse - chosen.sum(0)[place], 0.0), lse


@torch.library.custom_op("longspan::cluster_losses_backward", mutates_args=())
def _cluster_backward(
    grad: Tensor,
    lse: Tensor,
    hidden: Tensor,
    table: Tensor,
    bias: Tensor,
    targets: Tensor,
    order: Tensor,
    count: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from longspan.kernels.cluster_losses.kernels import hidden_kernel, table_kernel

    hidden, table, grad = hidden.contiguous(), table.contiguous(), grad.contiguous()
    (N, D), V, how = hidden.shape, table.shape[0], backward_launch(hidden)
    given = (hidden, table, bias, order, count, targets, lse, grad)
    of_hidden = hidden.new_zeros(N, D, dtype=torch.float32)
    of_table, of_bias = torch.empty_like(table), torch.empty_like(bias)
    options = {"BM": how.tokens, "BN": how.entries, "BD": how.units, **common(hidden, how)}
    blocks = -(-D // how.units)
    hidden_kernel[(-(-N // how.tokens), how.splits, blocks)](*given, of_hidden, scale, V, D, part(V, how), **options)
    table_kernel[(-(-V // how.entries), blocks)](*given, of_table, of_bias, scale, V, D, **options)
    return of_hidden.to(hidden.dtype), of_table, of_bias


def part(V: int, how: Launch) -> int:
    """Entries of a part of the table: complete tiles."""
    tiles = -(-V // how.entries)
    return -(-tiles // how.splits) * how.entries


def common(hidden: Tensor, how: Launch) -> dict[str, Any]:
    inner = min(how.inner, padded(hidden.shape[1]))
    precision = "ieee" if hidden.dtype == torch.float32 else "tf32"
    return {"BK": inner, "PRECISION": precision, "num_warps": how.num_warps}


@_cluster.register_fake
def _(hidden, table, bias, targets, here, order, count, scale):  # type: ignore[no-untyped-def]
    return tuple(hidden.new_empty(targets.shape, dtype=torch.float32) for _ in range(2))


@_cluster_backward.register_fake
def _(grad, lse, hidden, table, bias, targets, order, count, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(hidden), torch.empty_like(table), torch.empty_like(bias)


def _save_cluster(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, table, bias, targets, _, order, count, ctx.scale = inputs
    ctx.save_for_backward(output[1], hidden, table, bias, targets, order, count)


def _differentiate_cluster(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_cluster_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None, None, None)


_cluster.register_autograd(_differentiate_cluster, setup_context=_save_cluster)


def chunked_losses(
    hidden: Float[Tensor, "N D"],
    table: Float[Tensor, "V D"],
    bias: Float[Tensor, "V"],
    targets: Int[Tensor, "N"],
    temperature: float = 1.0,
) -> Float[Tensor, "N"]:
    """The loss of every token among all entries of the table."""
    return _chunked(hidden, table, bias, targets, 1.0 / temperature)[0]


def chunks(hidden: Tensor, table: Tensor) -> list[slice]:
    N, size = hidden.shape[0], max(1, CHUNK_SCORES // table.shape[0])
    return [slice(first, min(first + size, N)) for first in range(0, N, size)]


def aligned(table: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """With zero rows up to a multiple of 64: products with an odd number of columns are slow."""
    missing = -table.shape[0] % ALIGNED
    return (F.pad(table, (0, 0, 0, missing)), F.pad(bias, (0, missing))) if missing else (table, bias)


@torch.library.custom_op("longspan::chunked_losses", mutates_args=())
def _chunked(hidden: Tensor, table: Tensor, bias: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from longspan.kernels.cluster_losses.kernels import row_losses_kernel

    N, V = hidden.shape[0], table.shape[0]
    table, bias = aligned(table, bias)
    losses, lse = (hidden.new_empty(N, dtype=torch.float32) for _ in range(2))
    for some in chunks(hidden, table):
        scores = torch.addmm(bias, hidden[some], table.t())
        row_losses_kernel[(len(scores),)](
            scores, targets[some], lse[some], losses[some], scale, V, len(table), BN=row_block(scores)
        )
    return losses, lse


@torch.library.custom_op("longspan::chunked_losses_backward", mutates_args=())
def _chunked_backward(
    grad: Tensor, lse: Tensor, hidden: Tensor, table: Tensor, bias: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from longspan.kernels.cluster_losses.kernels import row_slopes_kernel

    V, grad = table.shape[0], grad.contiguous()
    table, bias = aligned(table, bias)
    of_hidden = torch.empty_like(hidden)
    of_table, of_bias = (torch.zeros_like(part, dtype=torch.float32) for part in (table, bias))
    for some in chunks(hidden, table):
        scores = torch.addmm(bias, hidden[some], table.t())
        block = row_block(scores)
        row_slopes_kernel[(len(scores), -(-len(table) // block))](
            scores, targets[some], lse[some], grad[some], scale, V, len(table), BN=block
        )
        torch.mm(scores, table, out=of_hidden[some])
        # Chunks are added in float32: a running sum in bfloat16 would lose the last of them.
        of_table += scores.t() @ hidden[some]
        of_bias += scores.sum(0, dtype=torch.float32)
    return of_hidden, of_table[:V].to(table.dtype, copy=True), of_bias[:V].to(bias.dtype, copy=True)


def row_block(scores: Tensor) -> int:
    return 4096 if scores.is_cuda else 16


@_chunked.register_fake
def _(hidden, table, bias, targets, scale):  # type: ignore[no-untyped-def]
    return tuple(hidden.new_empty(targets.shape, dtype=torch.float32) for _ in range(2))


@_chunked_backward.register_fake
def _(grad, lse, hidden, table, bias, targets, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(hidden), torch.empty_like(table), torch.empty_like(bias)


def _save_chunked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(output[1], *tensors)


def _differentiate_chunked(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_chunked_backward(grad, *ctx.saved_tensors, ctx.scale), None, None)


_chunked.register_autograd(_differentiate_chunked, setup_context=_save_chunked)
