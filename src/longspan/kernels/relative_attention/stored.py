"""A backward pass that stores tiles of weights and of gradients of the scores (stored_backward.py).

By count it needs 8 products per tile instead of 12, and writes and reads 16 KB per tile of 64 by 64. The stored tiles
take at most `Plan.limit` bytes, whatever the lengths are (docs/speed.md). Documents need the kernels that compute the
scores again.

A slot is a row and head. Its keys are split into parts of equal numbers of tiles, and a cell is one part of the keys
of one slot, with all queries. For example, 16 rows of 8 heads with memory 8,192, segments of 512 and at most 4,096 keys
per cell have 128 slots and 136 columns of tiles in 3 parts: 384 cells of 46 columns.

It is one launch, or with `Plan.lanes` a launch per role for every group of cells, on several streams: the programs of
one launch use the multiprocessors that another leaves idle. That costs time on the host, except in a CUDA graph.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from longspan.cuda_graphs import is_for_graph
from longspan.shapes import Tensor

BOTH, PRODUCER, READER = range(3)
"""The roles of the programs of a launch."""


@dataclass(frozen=True)
class Plan:
    """How much is stored at a time, and the launch options of the kernel."""

    limit: int = 208 << 20  # bytes of stored tiles
    keys: int = 1024  # of a cell; more keys are split
    planes: int = 2  # 3: also gradients by distance, instead of atomics for every tile
    ahead: int = 384  # producers that start before the readers of their cells; about as many as run at a time
    stages: int = 3  # of the loops that read; heads wider than 64 have at most two
    prefetch: bool = True  # into the L2 cache, all tiles of a reader
    registers: int | None = 168
    lanes: int = 0  # streams with launches of their own; 0: one launch

    def backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, distance: Tensor,
        u: Tensor, w: Tensor, seed: Tensor | None, window: int, dropout: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of query, key, value and distance, and shares of those of u + w and of u."""
        from longspan.kernels.relative_attention.fused import LOG2E, empty_heads, launch, padded
        from longspan.kernels.relative_attention.fused_backward import prepare_kernel
        from longspan.kernels.relative_attention.stored_backward import stored_kernel

        B, H, L, D = query.shape
        K, C, BD = key.shape[2], distance.shape[1], padded(D)
        how = launch("query", query, K, plain=dropout == 0.0)
        T = how.T
        cells = cells_of(self, B * H, L, K, T, query.element_size())
        u, w = u.contiguous(), w.contiguous()
        with_w, delta = query.new_empty(B, H, L, D), torch.empty_like(lse)
        prepare_kernel[(-(-L // 64), B * H)](
            query, u, w, out, grad, None, with_w, delta,
            *query.stride()[:3], *out.stride()[:3], *grad.stride()[:3], H, L, D=D, BD=BD, T=64,
        )  # fmt: skip
        stored = query.new_empty(cells.ring, cells.blocks, cells.columns, self.planes, T, T)
        sums = (B, H, cells.blocks, T, BD) if cells.split else (1,)
        partial = query.new_empty(sums, dtype=torch.float32)
        grad_distance, flags = zeros(query, (H, C, D), 4 + 2 * cells.count)
        grad_query, grad_key, grad_value = empty_heads(query, L), empty_heads(key, K), empty_heads(value, K)
        grad_biases = query.new_empty(B, H, cells.blocks, D, dtype=torch.float32)
        grad_u = query.new_empty(B, H, cells.all_tiles, D, dtype=torch.float32)
        registers: dict[str, Any] = {}
        if self.registers is not None and how.registers is not None:
            registers["maxnreg"] = self.registers

        def launched(role: int, grid: tuple[int, ...], into: Tensor, first_cell: int = 0) -> None:
            stored_kernel[grid](
                query, u, w, with_w, key, value, distance, grad, lse, delta, seed,
                into, partial, flags, grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u,
                *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *distance.stride()[:2],
                *grad.stride()[:3], *grad_query.stride()[:3], *grad_key.stride()[:3], *grad_value.stride()[:3],
                H, L, K - L, C, window, D**-0.5, LOG2E * D**-0.5, dropout, cells.slots, cells.count, cells.lag,
                cells.ring, cells.blocks, cells.tiles, cells.all_tiles, first_cell,
                D=D, BD=BD, T=T, WINDOW=window > 0, DROPOUT=dropout > 0.0, SLIDE=how.slide,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32", PLANES=self.planes, SPLIT=cells.split,
                STAGES=self.stages if D <= 64 else min(self.stages, 2), PREFETCH=self.prefetch, ROLE=role,
                num_warps=how.num_warps, num_stages=how.num_stages, **({} if role == READER else registers),
            )  # fmt: skip

        if not self.lanes:
            launched(BOTH, (cells.programs(self.planes),), stored)
            return grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u
        with forked(query.device, cells.lanes) as streams:
            for group in groups_of(cells):
                into, first_cell = stored[group.lane * cells.together :], group.part * cells.slots + group.first_slot
                unseen = max(0, group.part * cells.tiles - (cells.all_tiles - cells.blocks))
                with torch.cuda.stream(streams[group.lane]):
                    launched(PRODUCER, (cells.blocks - unseen, group.slots), into, first_cell)
                    launched(READER, (cells.readers(self.planes), group.slots), into, first_cell)
        return grad_query, grad_key, grad_value, grad_distance, grad_biases, grad_u


IN_GRAPH = Plan(lanes=3, keys=4096, limit=416 << 20, prefetch=False)
_plans: list[Any] = []


@contextmanager
def using(plan: Any) -> Iterator[None]:
    """Use this plan, another object with its method `backward`, or None in every backward pass of this block without
    documents: for tests and benchmarks."""
    _plans.append(plan)
    try:
        yield
    finally:
        _plans.pop()


def chosen(query: Tensor, keys: int, first_key: Tensor | None, window: int = 0) -> Plan | None:
    """The plan of this backward pass; None computes the scores again, as it is faster if a window hides most of the
    keys. Long rows and wide heads have a launch per role in a CUDA graph. Without one, many launches take longer on the
    host than the kernels on the device (docs/speed.md)."""
    if first_key is not None:
        return None
    if _plans:
        return _plans[-1]  # type: ignore[no-any-return]
    if not is_worth_it(query) or 0 < 2 * window < keys:
        return None
    wide = query.shape[-1] > 64
    planes = 3 if wide else 2
    if is_for_graph(query) and (wide or keys > 1024):
        return replace(IN_GRAPH, planes=planes)
    return Plan(planes=planes) if wide or keys <= 1024 else None


def is_worth_it(query: Tensor) -> bool:
    """Hopper in bfloat16, and more blocks of queries than run at a time."""
    from longspan.kernels.relative_attention.fused import is_hopper

    B, H, L, _ = query.shape
    enough = B * H * -(-L // 64) >= 1024
    return enough and query.dtype == torch.bfloat16 and query.device.type == "cuda" and is_hopper(query.device)


@dataclass(frozen=True)
class Cells:
    """How the work is split into cells, each with `tiles` columns of tiles, and how many are stored at a time."""

    slots: int
    blocks: int  # of queries
    tiles: int  # of keys, per cell
    all_tiles: int  # of keys
    ring: int  # cells that are stored at a time
    lag: int  # cells whose producers start before the readers of the first of them
    lanes: int = 0
    together: int = 0  # slots of a launch, if there are lanes

    @property
    def split(self) -> bool:
        return self.tiles < self.all_tiles

    @property
    def parts(self) -> int:
        """Of the keys."""
        return -(-self.all_tiles // self.tiles)

    @property
    def count(self) -> int:
        return self.parts * self.slots

    @property
    def columns(self) -> int:
        """Stored columns of tiles. The last is for the gradients by distance that a part leaves to the next one."""
        return self.tiles + self.split

    def readers(self, planes: int) -> int:
        return self.tiles + (self.tiles + self.blocks if planes == 3 else 0)

    def programs(self, planes: int) -> int:
        return self.count * (self.blocks + self.readers(planes))


def cells_of(plan: Plan, slots: int, L: int, K: int, T: int, size: int) -> Cells:
    """Equal parts of the keys, and as many cells as fit into the limit; one column of tiles, if nothing else fits. In
    one launch, the readers of a cell start when three quarters of the ring are in production, or earlier: reading takes
    a fifth of the time of producing."""
    blocks = -(-L // T)
    all_tiles = -(-(K - L) // T) + blocks
    column = plan.planes * size * blocks * T * T  # bytes
    tiles = max(1, min(plan.keys // T, plan.limit // column - 1))
    if tiles < all_tiles:
        tiles = -(-all_tiles // -(-all_tiles // tiles))
    tiles = min(tiles, all_tiles)
    parts = -(-all_tiles // tiles)
    fitting = max(1, plan.limit // (column * (tiles + (parts > 1))))
    if not plan.lanes:
        ring = min(parts * slots, fitting)
        return Cells(slots, blocks, tiles, all_tiles, ring, min(-(-plan.ahead // blocks), ring * 3 // 4))
    lanes = min(plan.lanes, fitting, slots)
    launches = -(-slots // (fitting // lanes))
    together = -(-slots // (-(-launches // lanes) * lanes))  # as many launches on every lane
    return Cells(slots, blocks, tiles, all_tiles, together * lanes, 0, lanes, together)


class Group(NamedTuple):
    """Cells whose tiles are stored by one launch and read by the next one on the same stream."""

    lane: int
    first_slot: int
    slots: int
    part: int


def groups_of(cells: Cells) -> Iterator[Group]:
    """All cells. The parts of a slot are in order on one lane, because each adds to the sums of the one before."""
    for number, slot in enumerate(range(0, cells.slots, cells.together)):
        for part in range(cells.parts):
            yield Group(number % cells.lanes, slot, min(cells.together, cells.slots - slot), part)


@contextmanager
def forked(device: torch.device, count: int) -> Iterator[Sequence[torch.cuda.Stream | None]]:
    """The current stream and others, which start after its work so far; it waits for them at the end. On a CPU there is
    none."""
    if device.type != "cuda":
        yield [None] * count
        return
    current = torch.cuda.current_stream(device)
    others = [_stream(device, number) for number in range(1, count)]
    for other in others:
        other.wait_stream(current)
    try:
        yield [current, *others]
    finally:
        for other in others:
            current.wait_stream(other)


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:  # noqa: ARG001 (a stream per number)
    return torch.cuda.Stream(device)


def zeros(like: Tensor, shape: tuple[int, ...], flags: int) -> tuple[Tensor, Tensor]:
    """A zeroed float32 tensor and `flags` zeroed int32 values from one allocation, so that one kernel clears both. Both
    are aligned to 16 bytes."""
    size = torch.Size(shape).numel()
    aligned = -(-size // 4) * 4
    both = like.new_zeros(aligned + flags, dtype=torch.float32)
    return both[:size].view(shape), both[aligned:].view(torch.int32)
