"""Batches of a task's examples, as the training loop reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.data.batch_streams import Batch
from longspan.errors import DataError
from longspan.transfer.formats import Sequences

_VERSION = 1
IGNORED = -1
"""The target of positions that are not classified."""
MULTIPLE = 16
"""The shortest length; longer ones are rounded up."""
POOL = 50
"""Batches that are sorted by length together, which makes padding rare and keeps the order random."""


def rounded(length: int) -> int:
    """A length that batches may have: four between a power of 2 and the next one (64, 80, 96, 112, 128, 160, ...).
    Every new length costs time on a GPU, for example the capture of a CUDA graph."""
    step = max(MULTIPLE, 2 ** ((length - 1).bit_length() - 3))
    return -(-length // step) * step


def by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Batches of indices, the shortest first. Padded to its longest item, a batch has at most `tokens` tokens, or it is
    a single item."""
    batch: list[int] = []
    for k in np.argsort(lengths, kind="stable").tolist():
        if batch and (len(batch) + 1) * lengths[k] > tokens:
            yield batch
            batch = []
        batch.append(k)
    if batch:
        yield batch


def collate(examples: Sequence[Sequences], longest: int | None = None) -> Batch:
    """Examples as arrays [B, R T]: the R sequences of an example side by side, T tokens each with padding. `longest` is
    the size of the longest sequence; default: that of these examples.

    `targets` has the classes of words at their marks, and the target of a whole example at its first token. `starts`
    marks the first token of the padding, so padding is another document and no token sees it.
    """
    count = len(examples[0].rows)
    length = rounded(longest or max(example.length for example in examples))
    shape = len(examples), count, length
    tokens, starts = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    targets = np.full(shape, IGNORED, np.int64)
    for b, example in enumerate(examples):
        for r, row in enumerate(example.rows):
            tokens[b, r, : len(row)] = row
            if len(row) < length:
                starts[b, r, len(row)] = True
        if len(example.targets):
            targets[b, 0, example.marks if len(example.marks) else [0]] = example.targets
    flat = len(examples), count * length
    return Batch(tokens.reshape(flat), targets.reshape(flat), starts.reshape(flat))


class ExampleBatches:
    """All examples in a new order in every pass. The order depends on the seed and the pass only, so a position is two
    numbers and a resume is exact. The last batch of a pass is filled with the first examples of its order."""

    document_starts: tuple[int, ...] = ()
    marks_starts = True
    complete_documents = True

    def __init__(self, examples: Sequence[Sequences], batch: int, seed: int, fingerprint: str, name: str) -> None:
        self.examples, self.batch, self.seed = list(examples), batch, seed
        self.fingerprint, self.name = fingerprint, name
        self.passes, self.index, self.position = 0, 0, 0
        self.lengths = np.array([example.length for example in self.examples])
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def per_pass(self) -> int:
        """Batches in a pass."""
        return -(-len(self.examples) // self.batch)

    def order(self) -> NDArray[np.int64]:
        """The examples of this pass, a row per batch."""
        if self._order is None or self._order[0] != self.passes:
            rng = np.random.default_rng([self.seed, self.passes])
            shuffled = np.resize(rng.permutation(len(self.examples)), self.per_pass * self.batch)
            size = POOL * self.batch
            pools = [shuffled[k : k + size] for k in range(0, len(shuffled), size)]
            sorted_ = [pool[np.argsort(self.lengths[pool], kind="stable")] for pool in pools]
            batches = np.concatenate(sorted_).reshape(-1, self.batch)
            self._order = self.passes, batches[rng.permutation(len(batches))]
        return self._order[1]

    def next(self, segment: int, rows: NDArray[np.int64] | None = None) -> Batch:  # noqa: ARG002 (documents are whole)
        if self.index == self.per_pass:
            self.passes, self.index = self.passes + 1, 0
        chosen = self.order()[self.index]
        self.index += 1
        own = [self.examples[k] for k in (chosen if rows is None else chosen[rows])]
        batch = collate(own, int(self.lengths[chosen].max()))  # all processes need the same length for the same masks
        # Every document starts with an empty memory.
        self.position = batch.tokens.shape[1]
        return batch

    def longest_segment(self, segment: int, batch: int) -> int:  # noqa: ARG002 (documents are whole)
        """The most tokens per row: all sequences of the longest example, with padding."""
        return len(self.examples[0].rows) * rounded(int(self.lengths.max()))

    def check_batch(self, batch: int) -> None:
        """Any number of rows is accepted, because a batch is filled with examples that repeat."""

    def rebatch(self, batch: int) -> None:
        raise DataError(f"the batch of a task cannot change during a run (from {self.batch} to {batch})")

    def state_dict(self) -> dict[str, Any]:
        facts = {"fingerprint": self.fingerprint, "examples": len(self.examples), "batch": self.batch}
        return {"version": _VERSION, **facts, "passes": self.passes, "index": self.index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        for key in ("version", "fingerprint", "examples", "batch"):
            if state.get(key) != own[key]:
                raise DataError(
                    f"the examples of {self.name} are not those this run was trained on ({key}={state.get(key)!r:.40}, "
                    f"now {own[key]!r:.40}); restore them, or start a new run"
                )
        passes, index = state.get("passes"), state.get("index")
        if not (type(passes) is int and type(index) is int and passes >= 0 and 0 <= index <= self.per_pass):
            raise DataError(f"the saved position in {self.name} is damaged; use an earlier checkpoint")
        self.passes, self.index = passes, index
