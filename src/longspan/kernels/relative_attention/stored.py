"""A backward pass that stores tiles of weights and of gradients of the scores, a part of the rows and keys at a time.

By count it needs 8 products per tile instead of 12, and writes and reads 16 KB per tile of 64 by 64. The buffer is
limited by `Plan.limit` bytes, whatever the lengths are (docs/speed.md). Documents need the kernels that compute the
scores again.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from longspan.shapes import Tensor


@dataclass(frozen=True)
class Plan:
    """How much is stored at a time, and the launch options of the kernels that read it."""

    limit: int = 208 << 20  # bytes of stored tiles, of all streams
    keys: int = 1024  # of a part of a row; more keys are split
    planes: int = 2  # 3: also gradients by distance, instead of atomics for every tile
    streams: int = 2  # parts that run at the same time
    longest: bool = False  # longest programs of all rows first, instead of row by row
    warps: int = 4
    stages: int = 2
    distance_stages: int = 3
    registers: int | None = 168


_plans: list[Plan] = []


@contextmanager
def using(plan: Plan) -> Iterator[None]:
    """Use stored tiles in every backward pass of this block without documents: for tests and benchmarks."""
    _plans.append(plan)
    try:
        yield
    finally:
        _plans.pop()


def chosen(first_key: Tensor | None) -> Plan | None:
    """The plan of this backward pass; None computes the scores again."""
    return _plans[-1] if _plans and first_key is None else None


@dataclass(frozen=True)
class Parts:
    """Rows of the batch and tiles of keys that are stored at a time."""

    rows: int
    tiles: int
    all_rows: int
    all_tiles: int

    @property
    def split(self) -> bool:
        return self.tiles < self.all_tiles

    def of_rows(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.all_rows, self.rows):
            yield first, min(self.rows, self.all_rows - first)

    def of_tiles(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.all_tiles, self.tiles):
            yield first, min(first + self.tiles, self.all_tiles)


def parts_of(plan: Plan, B: int, H: int, L: int, K: int, T: int, size: int) -> Parts:
    """Equal parts within the limit: first of the keys, then of the rows, the same number for every stream."""
    blocks = -(-L // T)
    all_tiles = -(-(K - L) // T) + blocks
    tiles = -(-all_tiles // -(-all_tiles * T // max(plan.keys, T)))
    each = plan.planes * size * H * blocks * (tiles + 1) * T * T * plan.streams
    most = max(1, min(B, plan.limit // each))
    count = -(-B // most)
    if count > 1:
        count = -(-count // plan.streams) * plan.streams
    return Parts(-(-B // count), tiles, B, all_tiles)


def streams(count: int, device: torch.device) -> list[Any]:
    """The current stream and others: the programs of one part fill the multiprocessors that another leaves idle."""
    if device.type != "cuda":
        return [None]
    return [torch.cuda.current_stream(device), *(_stream(device, n) for n in range(1, count))]


@functools.cache
def _stream(device: torch.device, _: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def forked(lanes: list[Any]) -> Iterator[None]:
    """The other streams start after what the current one has to do, and it waits for them at the end."""
    first, *others = lanes
    for other in others:
        other.wait_stream(first)
    yield
    for other in others:
        first.wait_stream(other)


def backward(
    plan: Plan, grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, distance: Tensor,
    u: Tensor, w: Tensor, seed: Tensor | None, window: int, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, distance, u and w; the last three in float32."""
    from longspan.kernels.relative_attention.fused import empty_heads, launch, padded
    from longspan.kernels.relative_attention.fused_backward import prepare_kernel

    B, H, L, D = query.shape
    K, C = key.shape[2], distance.shape[1]
    how = launch("query", query, K, plain=dropout == 0.0)
    T = how.T
    blocks = -(-L // T)
    parts = parts_of(plan, B, H, L, K, T, query.element_size())
    # The last column is for the gradients by distance that a part leaves to the next one.
    tiles = parts.tiles + (1 if parts.split else 0)
    slots = parts.rows * H
    lanes = streams(1 if parts.rows == B else plan.streams, query.device)
    with_u, with_w = query.new_empty(2, len(lanes), slots, L, D).unbind(0)
    stored = query.new_empty(len(lanes), slots, blocks, tiles, plan.planes, T, T)
    sums = (len(lanes), slots, blocks * T, padded(D)) if parts.split else (len(lanes), 1)
    partial = query.new_empty(sums, dtype=torch.float32)
    delta = torch.empty_like(lse)
    grad_query, grad_key, grad_value = empty_heads(query, L), empty_heads(key, K), empty_heads(value, K)
    grad_distance = query.new_zeros(H, C, D, dtype=torch.float32)
    grad_biases = query.new_empty(B, H, blocks, D, dtype=torch.float32)
    grad_u = query.new_empty(B, H, parts.all_tiles, D, dtype=torch.float32)
    shape: dict[str, Any] = {"D": D, "BD": padded(D), "T": T, "SLIDE": how.slide}
    shape["PRECISION"] = "ieee" if query.dtype == torch.float32 else "tf32"
    u, w = u.contiguous(), w.contiguous()
    with forked(lanes):
        for index, (first_row, rows) in enumerate(parts.of_rows()):
            lane = index % len(lanes)
            own = (with_u[lane], with_w[lane])
            with torch.cuda.stream(lanes[lane]):
                prepare_kernel[(-(-L // 64), rows * H)](
                    query, u, w, out, grad, *own, delta, *query.stride()[:3], *out.stride()[:3], *grad.stride()[:3],
                    H, L, first_row * H, D=D, BD=padded(D), T=64,
                )  # fmt: skip
                for first_tile, end_tile in parts.of_tiles():
                    _part(
                        plan, (first_row * H, rows, first_tile, end_tile, tiles, parts), shape, how,
                        (*own, key, value, distance, grad, lse, delta, seed), stored[lane], partial[lane],
                        (grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u), C, window, dropout,
                    )  # fmt: skip
    of_u = grad_u.sum((0, 2))
    return grad_query, grad_key, grad_value, grad_distance, of_u, grad_biases.sum((0, 2)) - of_u


def _part(
    plan: Plan, part: tuple[Any, ...], shape: dict[str, Any], how: Any, given: tuple[Any, ...], stored: Tensor,
    partial: Tensor, grads: tuple[Tensor, ...], C: int, window: int, dropout: float,
) -> None:  # fmt: skip
    """The kernels of one part of the rows and keys."""
    from longspan.kernels.relative_attention.fused import LOG2E
    from longspan.kernels.relative_attention.stored_backward import (
        stored_distance_kernel,
        stored_key_kernel,
        storing_kernel,
    )

    first_slot, rows, first_tile, end_tile, tiles, parts = part
    with_u, with_w, key, value, distance, grad, *_ = given
    grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u = grads
    (_, H, L, D), K, T = grad_query.shape, key.shape[2], shape["T"]
    M, blocks = K - L, -(-L // T)
    registers = {} if plan.registers is None or how.registers is None else {"maxnreg": plan.registers}
    seen_from = blocks - max(0, first_tile - -(-M // T))  # earlier blocks of queries do not see these keys
    grid = (rows * H, seen_from) if plan.longest else (seen_from, rows * H)
    storing_kernel[grid](
        *given, stored, partial, grad_query, grad_distance, grad_biases,
        *key.stride()[:3], *value.stride()[:3], *distance.stride()[:2], *grad.stride()[:3], *grad_query.stride()[:3],
        H, L, M, C, window, D**-0.5, LOG2E * D**-0.5, dropout, first_slot, first_tile, end_tile, blocks, tiles,
        **shape, WINDOW=window > 0, DROPOUT=dropout > 0.0, PLANES=plan.planes, SPLIT=parts.split,
        LONGEST=plan.longest, num_warps=how.num_warps, num_stages=how.num_stages, **registers,
    )  # fmt: skip
    stored_key_kernel[(end_tile - first_tile, rows * H)](
        stored, with_u, grad, key, grad_key, grad_value, grad_u, *grad.stride()[:3], *key.stride()[:3],
        *grad_key.stride()[:3], *grad_value.stride()[:3],
        H, L, M, window, first_slot, first_tile, blocks, tiles, parts.all_tiles,
        **shape, WINDOW=window > 0, PLANES=plan.planes, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if plan.planes == 3:
        last = end_tile + (1 if end_tile < parts.all_tiles else 0)
        reached = (window - 2 + T) // T if window else parts.all_tiles
        distances = parts.all_tiles - first_tile - max(parts.all_tiles - blocks - last + 1, 0)
        stored_distance_kernel[(distances, H, min(rows, 4))](
            stored, with_w, grad_distance, H, L, M, C, first_tile, last, blocks, rows, tiles, reached,
            **shape, num_warps=4, num_stages=plan.distance_stages,
        )  # fmt: skip
