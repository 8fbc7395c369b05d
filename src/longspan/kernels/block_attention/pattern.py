"""Sparse patterns: which keys a query sees, as an elementwise rule with bounds that allow skipping blocks.

A pattern is a union of parts. Positions are counted from the first token of a document, so the result for a document
does not depend on where it starts. For a document of n tokens, a part defines: the queries and keys that it concerns,
in an order that puts related positions next to each other (`strands`); a range of keys that contains all keys visible
to a range of queries (`spans`); and the rule itself (`sees`). The rule works on tensors of any shape with pointwise
operations only, because kernels are compiled from it. For the same reason its shapes are not checked in tests
(`no_type_check`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, no_type_check

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.shapes import Bool, Tensor

Positions = NDArray[np.int64]
FAR = 2**30
"""More than the length of any text; fits an int32."""


class Part(ABC):
    """A part of a pattern."""

    absolute: ClassVar[bool] = True
    """Whether the rule depends on positions, not only on their difference."""
    per_head: ClassVar[bool] = False

    def strands(self, n: int) -> Iterator[tuple[Positions, Positions]]:
        """Increasing positions of queries and of keys. No query of one strand sees a key of another."""
        yield np.arange(n), np.arange(n)

    @abstractmethod
    def spans(self, head: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Ranges of keys, both ends included, that contain all keys visible to the queries low..high."""

    @abstractmethod
    def sees(self, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
        """Whether the query sees the key, without the causal mask."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027 (most rules need no tensors)
        """Create the tensors that the rule uses on a device. It cannot create them while a kernel is compiled from
        it."""


@dataclass(frozen=True)
class Window(Part):
    """The keys at distances before*step, ..., 2*step, step, 0, -step, ..., -after*step."""

    before: int = FAR
    after: int = 0
    step: int = 1
    absolute: ClassVar[bool] = False

    def strands(self, n: int) -> Iterator[tuple[Positions, Positions]]:
        for residue in range(min(self.step, n)):
            positions = np.arange(residue, n, self.step)
            yield positions, positions

    def spans(self, head: int, low: int, high: int) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        yield low - self.before * self.step, high + self.after * self.step

    @no_type_check
    def sees(self, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:  # noqa: ARG002
        gap = query - key
        near = (gap <= min(self.before * self.step, FAR)) & (gap >= -self.after * self.step)
        return near & (gap % self.step == 0) if self.step > 1 else near


@dataclass(frozen=True)
class Chunks(Part):
    """Chunks of `size` positions; a query sees its own chunk, `before` chunks before it and `after` chunks after it."""

    size: int
    before: int = 0
    after: int = 0

    def spans(self, head: int, low: int, high: int) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        first, last = low // self.size - self.before, high // self.size + self.after
        yield first * self.size, (last + 1) * self.size - 1

    @no_type_check
    def sees(self, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:  # noqa: ARG002
        gap = query // self.size - key // self.size
        return (gap <= self.before) & (gap >= -self.after)


@dataclass(frozen=True)
class Columns(Part):
    """Keys that every query sees: positions begin..end-1 of every `size` positions."""

    begin: int
    end: int
    size: int = FAR

    def strands(self, n: int) -> Iterator[tuple[Positions, Positions]]:
        positions = np.arange(n)
        column = positions % self.size
        yield positions, positions[(column >= self.begin) & (column < self.end)]

    def spans(self, head: int, low: int, high: int) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        yield 0, FAR

    @no_type_check
    def sees(self, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:  # noqa: ARG002
        column = key % self.size
        return (column >= self.begin) & (column < self.end) & (query >= 0)


@dataclass(frozen=True)
class Rows(Part):
    """Queries that see every key: the first `end` positions."""

    end: int

    def strands(self, n: int) -> Iterator[tuple[Positions, Positions]]:
        yield np.arange(min(n, self.end)), np.arange(n)

    def spans(self, head: int, low: int, high: int) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        yield 0, FAR

    @no_type_check
    def sees(self, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:  # noqa: ARG002
        return (query < self.end) & (key >= 0)


@dataclass(frozen=True, eq=False)
class Graph(Part):
    """Edges between blocks of `size` positions: `table[head, i]` are the key blocks of query block i, -1 for none."""

    size: int
    table: NDArray[np.int64]
    on_device: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    per_head: ClassVar[bool] = True

    def spans(self, head: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        for block in {int(k) for row in self.table[head, low // self.size : high // self.size + 1] for k in row}:
            if block >= 0:
                yield block * self.size, (block + 1) * self.size - 1

    @no_type_check
    def sees(self, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
        self.prepare(query.device)
        table = self.on_device[query.device]
        row, block = (query // self.size).clamp(0, table.shape[1] - 1), key // self.size
        seen = torch.zeros_like(query == key)
        for edge in range(table.shape[2]):
            seen = seen | (table[head, row, edge] == block)
        return seen & (query >= 0) & (key >= 0)

    @no_type_check
    def prepare(self, device: torch.device) -> None:
        if device not in self.on_device:
            with torch.inference_mode(False):
                self.on_device[device] = torch.from_numpy(self.table).to(device)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The keys that some heads see: the union of the parts, without later keys if `causal`.

    Every query must see at least one key. A key that several parts show counts once, for the first of them.
    """

    parts: tuple[Part, ...]
    causal: bool = True
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def absolute(self) -> bool:
        return any(part.absolute for part in self.parts)

    def seen(self, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
        """The rule, for positions in a document."""
        shown = self.parts[0].sees(head, query, key)
        for part in self.parts[1:]:
            shown = shown | part.sees(head, query, key)
        return shown & (key <= query) if self.causal else shown

    @no_type_check
    def seen_first_by(self, index: int, head: Any, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
        """Whether part `index` shows the key and no earlier part does."""
        shown = self.parts[index].sees(head, query, key)
        for part in self.parts[:index]:
            shown = shown & ~part.sees(head, query, key)
        return shown & (key <= query) if self.causal else shown
