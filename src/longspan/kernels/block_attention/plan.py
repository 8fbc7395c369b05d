"""The plan of a pattern: blocks of queries and keys, and the key blocks that each query block visits.

A plan is made on the host from the bounds of the pattern, never from an L x L matrix, and is cached per length.
Segments with document starts need their own plan if the pattern depends on positions in a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from longspan.kernels.block_attention.pattern import FAR, Chunks, Graph, Part, Pattern, Positions, Window
from longspan.shapes import Float, Int, Tensor

Documents = Sequence[tuple[int, int]]
"""First position and one past the last of each document of a row."""

_MOST_CACHED = 16


@dataclass(frozen=True)
class Slots:
    """Positions of a row in the order of the blocks, -1 for an empty slot; a single row if all rows are equal."""

    index: Int[Tensor, "R S"]
    run: tuple[int, int] | None = None
    """Empty slots before and after, if the others are all positions in order. Then padding replaces the gather."""

    def take(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H S D"]:
        """x in the order of the slots. Empty slots get any value, because they are masked."""
        if self.run is not None:
            return F.pad(x, (0, 0, *self.run))
        return take(x, self.index.clamp(min=0)[:, None])


@dataclass(frozen=True)
class Plan:
    """Blocks of `P` queries and `S` keys; `visits[r, g, q]` are the key blocks of query block q, -1 for none.

    G is 1 or the number of heads. The first query is key `offset`. `back[r, i]` is the slot of query i, -1 if the part
    does not concern it. If visited blocks are consecutive, the one in column `behind` is the query block's own, and
    neighbouring positions in a block are `step` apart.
    """

    queries: Slots
    keys: Slots
    visits: Int[Tensor, "R G Q N"]
    back: Int[Tensor, "R L"]
    offset: int
    P: int
    S: int
    behind: int | None
    step: int
    made: dict[str, Any] = field(default_factory=dict, repr=False)

    def query_positions(self) -> Int[Tensor, "R 1 Q P 1"]:
        """The key position of each query, -1 for none."""
        positions = torch.where(self.queries.index >= 0, self.queries.index + self.offset, -1)
        return positions.unflatten(1, (-1, self.P))[:, None, :, :, None]

    def key_positions(self) -> Int[Tensor, "R G Q 1 NS"]:
        """The visited keys of each query block, -1 for none."""
        R, G, Q, N = self.visits.shape
        blocks = self.keys.index.view(R, 1, -1, self.S).expand(-1, G, -1, -1)
        found = blocks.gather(2, self.visits.clamp(min=0).view(R, G, Q * N, 1).expand(-1, -1, -1, self.S))
        return found.view(R, G, Q, N, self.S).masked_fill(self.visits[..., None] < 0, -1).flatten(3)[:, :, :, None]

    def visited(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H Q NS D"]:
        """Keys or values of the blocks that each query block visits."""
        B, H, _, D = x.shape
        Q, N = self.visits.shape[2:]
        blocks = self.keys.take(x).unflatten(2, (-1, self.S)).flatten(3)
        found = take(blocks, self.visits.clamp(min=0).flatten(2))
        return found.view(B, H, Q, N * self.S, D)


def take(x: Float[Tensor, "B H T D"], index: Int[Tensor, "R G S"]) -> Float[Tensor, "B H S D"]:
    """x at these positions; an index of one row or head is used for all."""
    if index.shape[0] == index.shape[1] == 1:
        return x.index_select(2, index[0, 0])
    B, H, _, D = x.shape
    return x.gather(2, index[..., None].expand(B, H, -1, D))


def plans(
    pattern: Pattern,
    heads: int,
    L: int,
    K: int,
    device: torch.device,
    first_key: Int[Tensor, "B L"] | None = None,
    block: int | None = None,
) -> list[Plan]:
    """A plan for each part of the pattern; `block` fixes the size of all blocks."""
    by_document = pattern.absolute and first_key is not None
    key: Any = ("documents", block) if by_document else (heads, L, K, device, block)
    if key in pattern.plans:
        made_for, cached = pattern.plans[key]
        if made_for is (first_key if by_document else None):
            return cached
    rows: list[Documents] = [documents(row) for row in first_key.cpu().numpy()] if by_document else [[(0, K)]]  # type: ignore
    with torch.inference_mode(False):  # cached plans must also work in training, where autograd saves them
        made = [lay_out(part, pattern.causal, heads, rows, L, K, block, device) for part in pattern.parts]
    while len(pattern.plans) >= _MOST_CACHED:
        del pattern.plans[next(iter(pattern.plans))]
    pattern.plans[key] = (first_key if by_document else None, made)
    return made


def documents(first_key: Positions) -> Documents:
    """The documents of a row, from the first position of each token's document."""
    starts = np.flatnonzero(np.diff(first_key, prepend=-1))
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(first_key)], strict=True))


def lay_out(
    part: Part,
    causal: bool,
    heads: int,
    rows: Sequence[Documents],
    L: int,
    K: int,
    block: int | None,
    device: torch.device,
) -> Plan:
    """The blocks of one part, for rows of documents over K positions of which the last L are queries."""
    longest = max(end - begin for row in rows for begin, end in row)
    P, S = (block, block) if block else block_sizes(part, longest)
    heads = heads if part.per_head else 1
    laid = [_Row(part, causal, heads, row, K - L, P, S) for row in rows]
    seen = [(row.own[q], k) for row in laid for head in row.visits for q, ks in enumerate(head) for k in ks]
    aligned = isinstance(part, Window)
    behind = max((own - k for own, k in seen), default=0)
    ahead = max((k - own for own, k in seen), default=0)
    most = max((len(ks) for row in laid for head in row.visits for ks in head), default=0)
    Q, N = (max(1, *(len(blocks) for blocks in each)) for each in ([r.queries for r in laid], [r.keys for r in laid]))
    if block and len(rows) > 1:
        # Documents differ in every batch. Rounding up to powers of two limits the number of shapes to compile for.
        Q, N = (1 << (count - 1).bit_length() for count in (Q, N))
    visits = np.full((len(rows), heads, Q, behind + 1 + ahead if aligned else max(most, 1)), -1)
    for r, row in enumerate(laid):
        for g, head in enumerate(row.visits):
            for q, ks in enumerate(head):
                # Consecutive blocks are stored in the column of their distance, so the distances of a tile are known.
                visits[r, g, q, [k - row.own[q] + behind for k in ks] if aligned else slice(len(ks))] = ks
    queries, keys = _stacked([row.queries for row in laid], Q, P), _stacked([row.keys for row in laid], N, S)
    queries[queries >= 0] -= K - L
    back = np.full((len(rows), L), -1)
    for r, positions in enumerate(queries):
        slots = np.flatnonzero(positions >= 0)
        back[r, positions[slots]] = slots
    visits_, back_ = (torch.from_numpy(array).to(device) for array in (visits, back))
    of_queries, of_keys = _slots(queries, L, device), _slots(keys, K, device)
    step = part.step if isinstance(part, Window) else 1
    return Plan(of_queries, of_keys, visits_, back_, K - L, P, S, behind if aligned else None, step)


def block_sizes(part: Part, n: int) -> tuple[int, int]:
    """Block sizes with little waste: about half a window, a chunk, and at most the longest strand."""
    size = 64
    if isinstance(part, Window):
        width = part.before + part.after
        size, n = (128 if width > 512 else 64 if width > 48 else 16), -(-n // part.step)
    elif isinstance(part, Chunks | Graph) and 16 <= part.size <= 128:
        size = part.size
    size = min(size, max(-(-n // 16) * 16, 16))
    fewest = max(len(keys) for _, keys in part.strands(n))
    return size, size if isinstance(part, Window) else min(size, max(-(-fewest // 16) * 16, 16))


class _Row:
    """The blocks of one row: positions of queries and keys, and the key blocks that each head of a query block visits.

    `own` is the key block that contains a query block's own positions, if queries and keys have the same blocks.
    """

    def __init__(
        self, part: Part, causal: bool, heads: int, documents: Documents, first_query: int, P: int, S: int
    ) -> None:
        self.queries: list[Positions] = []
        self.keys: list[Positions] = []
        self.own: list[int] = []
        self.visits: list[list[list[int]]] = [[] for _ in range(heads)]
        for begin, end in documents:
            for queries, keys in part.strands(end - begin):
                queries = queries[queries + begin >= first_query]
                if not len(queries):
                    continue
                base = len(self.keys)
                # Queries of a window use the same blocks as its keys, also with memory before them.
                slot = np.searchsorted(keys, queries) if isinstance(part, Window) else np.arange(len(queries))
                for block in np.unique(slot // P):
                    here = slot // P == block
                    mine = queries[here]
                    positions = np.full(P, -1)
                    positions[slot[here] % P] = mine + begin
                    self.queries.append(positions)
                    self.own.append(base + int(block))
                    for head, visited in enumerate(self.visits):
                        low, high = int(mine[0]), int(mine[-1])
                        found = visited_blocks(part, head, low, high, keys, high if causal else FAR, S)
                        visited.append([base + k for k in found])
                for start in range(0, len(keys), S):
                    positions = np.full(S, -1)
                    positions[: len(keys[start : start + S])] = keys[start : start + S] + begin
                    self.keys.append(positions)


def visited_blocks(part: Part, head: int, low: int, high: int, keys: Positions, last: int, size: int) -> list[int]:
    """The blocks of the increasing `keys` with a key that the queries low..high may see, up to `last`."""
    found: set[int] = set()
    for a, b in part.spans(head, low, high):
        i, j = np.searchsorted(keys, a, "left"), np.searchsorted(keys, min(b, last), "right")
        if j > i:
            found.update(range(int(i) // size, int(j - 1) // size + 1))
    return sorted(found)


def _stacked(rows: Sequence[Sequence[Positions]], count: int, size: int) -> Positions:
    """Rows of blocks as one array of slots, padded with -1."""
    stacked = np.full((len(rows), count, size), -1)
    for r, blocks in enumerate(rows):
        if len(blocks):
            stacked[r, : len(blocks)] = blocks
    return stacked.reshape(len(rows), -1)


def _slots(index: Positions, count: int, device: torch.device) -> Slots:
    run = None
    if len(index) == 1:
        filled = np.flatnonzero(index[0] >= 0)
        if len(filled) == count and np.array_equal(index[0, filled[0] : filled[0] + count], np.arange(count)):
            run = (int(filled[0]), index.shape[1] - count - int(filled[0]))
    return Slots(torch.from_numpy(index).to(device), run)
