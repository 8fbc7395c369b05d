"""The keys of a block of queries, split over several programs: for batches too small to use every multiprocessor.

One program per block of queries and head is 64 programs at batch 1 with 8 heads and 512 queries, and an H200 has 132
multiprocessors. So several programs share a block: each has a part of its tiles of keys and writes float32 results, and
one kernel joins them, in a fixed order.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longspan.shapes import Float, Tensor

PER_MULTIPROCESSOR = 2
"""Programs per multiprocessor that the split aims at. Three fit, but the tiles that a split repeats cost more."""
FEWEST_TILES = 3
"""Tiles of keys of one part. Every part computes one more block of position scores, and its gradient one more tile."""

_forced: list[int] = []


@contextmanager
def using(parts: int) -> Iterator[None]:
    """Use `parts` programs per block of queries inside this context; 1 disables splitting. For tests and benchmarks."""
    _forced.append(parts)
    try:
        yield
    finally:
        _forced.pop()


def parts_of(query: Float[Tensor, "B H L D"], keys: int, window: int, T: int) -> int:
    """Programs per block of T queries."""
    if _forced:
        return _forced[-1]
    if query.device.type != "cuda":
        return 1
    B, H, L, _ = query.shape
    tiles = -(-min(keys, window + T if window else keys) // T)
    return chosen_parts(B * H * -(-L // T), tiles, multiprocessors(query.device))


def chosen_parts(programs: int, tiles: int, available: int) -> int:
    """Parts of `programs` blocks of at most `tiles` tiles each, on so many multiprocessors."""
    if programs >= available:
        return 1
    return max(1, min(PER_MULTIPROCESSOR * available // programs, tiles // FEWEST_TILES))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def partial(like: Float[Tensor, "B H L D"], parts: int) -> Float[Tensor, "P B H L D"]:
    """A float32 result for every part."""
    return like.new_empty(parts, *like.shape, dtype=torch.float32)


def join_outputs(
    out: Float[Tensor, "B H L D"],
    lse: Float[Tensor, "B H L"],
    parts: Float[Tensor, "P B H L D"],
    lse_of_parts: Float[Tensor, "P B H L"],
) -> None:
    """Write `out` and `lse`: the sum of the outputs of all parts, each weighted by its share of exp(lse)."""
    from longspan.kernels.relative_attention.fused import padded
    from longspan.kernels.relative_attention.split_kernels import ROWS, join_outputs_kernel

    B, H, L, D = out.shape
    join_outputs_kernel[(-(-L // ROWS), B * H)](
        parts, lse_of_parts, out, lse, *out.stride()[:3], H, L, len(parts), D=D, BD=padded(D), num_warps=4
    )


def join_gradients(
    grad_query: Float[Tensor, "B H L D"],
    parts: Float[Tensor, "P B H L D"],
    grad_biases: Float[Tensor, "P B H N D"],
    grad_u: Float[Tensor, "B H J D"],
    grad_distance: Float[Tensor, "H C D"],
    table: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
) -> tuple[Float[Tensor, "H C D"], Float[Tensor, "H D"], Float[Tensor, "H D"]]:
    """Write `grad_query`; returns the gradients of distance, u and w in the dtypes and the layout of
    `table`, `u` and `w`."""
    from longspan.kernels.relative_attention.fused import padded
    from longspan.kernels.relative_attention.split_kernels import ROWS, join_gradients_kernel

    B, H, L, D = grad_query.shape
    of_distance, of_u, of_w = torch.empty_like(table), u.new_empty(H, D), w.new_empty(H, D)
    join_gradients_kernel[(-(-L // ROWS), B * H)](
        parts, grad_biases, grad_u, grad_distance, grad_query, of_distance, of_u, of_w, *grad_query.stride()[:3],
        *of_distance.stride(), H, L, len(parts), B, grad_biases.shape[3], grad_u.shape[2], table.shape[1],
        D=D, BD=padded(D), num_warps=4,
    )  # fmt: skip
    return of_distance, of_u, of_w
