"""BatchStreams: training batches whose rows are contiguous streams of one text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError, counted

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens [B, T]; targets [B, S], the next tokens of the last S; `starts` [B, T], true at the first token of a
    document. T is S except with an overlap."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    starts: NDArray[np.bool_]

    @property
    def new(self) -> int:
        """Tokens of a row that are not read again: S."""
        return self.targets.shape[1]


@runtime_checkable
class BatchSource(Protocol):
    """Where a training loop gets its batches: `BatchStreams`, or the examples of a task (`transfer.batches`)."""

    batch: int
    passes: int
    position: int
    """Tokens of every row that were read in this pass. If it equals the length of the last batch, all rows start."""
    name: str
    fingerprint: str
    document_starts: Any
    complete_documents: bool
    """Every batch is complete documents, so its length varies and memory is never carried to the next one."""

    @property
    def marks_starts(self) -> bool: ...
    def next(self, segment: int, rows: NDArray[np.int64] | None = None) -> Batch: ...
    def longest_segment(self, segment: int, batch: int) -> int: ...
    def check_batch(self, batch: int) -> None:
        """Raise a DataError if there is too little text for so many rows."""

    def rebatch(self, batch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BatchStreams:
    """Training batches in which each row continues where it ended in the previous batch, so memory can be carried.

    N tokens give N - 1 predictions, and each of B rows gets (N - 1) // B consecutive ones. In one pass over the text
    every token is input once and target once, except the first token (never a target) and the last predictions, fewer
    than B, that do not fill the rows. The last segment of a pass may be shorter. The next pass starts at the same
    positions.

    `starts` is true at the first token of each document, and at the first token of each row of each pass, because the
    memory of a row is then from another part of the text.

    With an overlap, every batch begins with that many tokens of the batch before, or fewer at the beginning of a pass.
    They have no targets.
    """

    complete_documents = False

    def __init__(
        self,
        ids: NDArray[Any],
        starts: NDArray[np.int64] | Sequence[int],
        batch: int,
        fingerprint: str = "",
        name: str = "the text",
        overlap: int = 0,
    ) -> None:
        self.ids, self.fingerprint, self.name, self.overlap = ids, fingerprint, name, overlap
        self.document_starts = np.sort(np.asarray(starts, np.int64))
        self.passes = 0
        self._full_pass = [(0, len(ids) - 1)]
        self._assign_rows(self._full_pass, batch)

    def _assign_rows(self, ranges: Sequence[tuple[int, int]], batch: int) -> None:
        """Concatenate ranges of predictions and divide them into rows of equal length."""
        lengths = np.array([stop - start for start, stop in ranges], np.int64)
        if batch < 1:
            raise DataError(f"batch={batch} must be at least 1")
        self._check_rows(batch, int(lengths.sum()))
        self.ranges, self.batch, self.position = list(ranges), batch, 0
        self.row_length = int(lengths.sum()) // batch
        # Prediction i of the concatenated ranges has input token i + offset[k], where k is the range that contains it.
        self._range_starts = np.cumsum(lengths) - lengths
        self._offsets = np.array([start for start, _ in ranges], np.int64) - self._range_starts

    @property
    def marks_starts(self) -> bool:
        """Whether tokens other than the first of a row can start a document or another part of the text."""
        return len(self.document_starts) > 1 or len(self.ranges) > 1

    def next(self, segment: int, rows: NDArray[np.int64] | None = None) -> Batch:
        """The next `segment` tokens of every row, or fewer at the end of a pass, after those of the overlap. With
        `rows`, only those are read; the position moves for all."""
        if segment < 1:
            raise DataError(f"segment={segment} must be at least 1")
        if self.position == self.row_length:
            self.passes += 1
            self._assign_rows(self._full_pass, self.batch)
        length = min(segment, self.row_length - self.position)
        chosen = np.arange(self.batch, dtype=np.int64) if rows is None else rows
        first = max(0, self.position - self.overlap)
        index = chosen[:, None] * self.row_length + np.arange(first, self.position + length, dtype=np.int64)
        range_of = np.searchsorted(self._range_starts, index, side="right") - 1
        at = index + self._offsets[range_of]
        starts = (index == self._range_starts[range_of]) | _contains(self.document_starts, at)
        starts[:, 0] |= first == 0
        self.position += length
        return Batch(self.ids[at].astype(np.int64), self.ids[at[:, -length:] + 1].astype(np.int64), starts)

    def longest_segment(self, segment: int, batch: int) -> int:
        """The most tokens per row of a batch of so many rows."""
        return min(segment, (len(self.ids) - 1) // batch)

    def check_batch(self, batch: int) -> None:
        self._check_rows(batch, len(self.ids) - 1)

    def _check_rows(self, batch: int, predictions: int) -> None:
        """Every row needs a prediction."""
        if predictions < batch:
            raise DataError(
                f"{self.name} has {counted(len(self.ids), 'token')}, too few for a batch of {counted(batch, 'row')}; "
                "use more text or a smaller training.batch"
            )

    def rebatch(self, batch: int) -> None:
        """Continue with another number of rows: the unread part of this pass is divided again."""
        if batch == self.batch:
            return
        unread = []
        for row in range(self.batch):
            unread += self._text_ranges(row * self.row_length + self.position, (row + 1) * self.row_length)
        unread += self._text_ranges(self.batch * self.row_length, sum(stop - start for start, stop in self.ranges))
        if sum(stop - start for start, stop in unread) < batch:
            self.passes += 1
            unread = self._full_pass
        self._assign_rows(unread, batch)

    def _text_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Predictions `first` to `last` of the concatenated ranges, as ranges of the text."""
        found = []
        for begin, (start, stop) in zip(self._range_starts.tolist(), self.ranges, strict=True):
            low, high = max(first - begin, 0), min(last - begin, stop - start)
            if low < high:
                found.append((start + low, start + high))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position in the text as plain values, with the fingerprint of the text."""
        return {
            "version": _VERSION,
            "fingerprint": self.fingerprint,
            "tokens": len(self.ids),
            "batch": self.batch,
            "passes": self.passes,
            "position": self.position,
            "stretches": [list(part) for part in self.ranges],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a `state_dict`. A position in another text, or a changed one, is an error."""
        if state.get("version") != _VERSION:
            found = str(state.get("version"))[:40]
            raise DataError(f"this data position has format {found}; this version of longspan reads format {_VERSION}")
        if state.get("fingerprint") != self.fingerprint or state.get("tokens") != len(self.ids):
            raise DataError(
                f"{self.name} is not the text this run was trained on (fingerprint {self.fingerprint[:12] or 'none'}, "
                f"not {str(state.get('fingerprint'))[:12] or 'none'}); restore that text, or start a new run"
            )
        try:
            batch, passes, position = (_non_negative_int(state[name]) for name in ("batch", "passes", "position"))
            ranges = [(_non_negative_int(start), _non_negative_int(stop)) for start, stop in state["stretches"]]
            ordered = all(0 <= start < stop < len(self.ids) for start, stop in ranges)
            row_length = sum(stop - start for start, stop in ranges) // batch
            if not ordered or batch < 1 or not 0 <= position <= row_length or row_length < 1:
                raise ValueError
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise DataError(f"the saved position in {self.name} is damaged; use an earlier checkpoint") from None
        self._assign_rows(ranges, batch)
        self.passes, self.position = passes, position


def _contains(values: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether sorted `values` contain each of `wanted`. Unlike np.isin, it does not sort millions of starts again."""
    if not len(values):
        return np.zeros(wanted.shape, np.bool_)
    return values[np.minimum(np.searchsorted(values, wanted), len(values) - 1)] == wanted


def _non_negative_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value
