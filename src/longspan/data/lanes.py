"""Lanes: a text cut into as many stretches as a batch has rows, read side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """[B, T] each: tokens, the tokens that follow them, and which tokens begin a document or a stretch."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    starts: NDArray[np.bool_]


class Lanes:
    """Training batches whose rows go on where they stopped, so that memory can be carried.

    N tokens give N - 1 predictions; each of B rows takes (N - 1) // B of them in a row. In one pass every token is read
    once and predicted once, save the first, which nothing comes before, and the remainder of up to B predictions at
    the end that does not fill the rows. A segment that reaches the end of a pass is cut short there; the next one
    begins the next pass, at the same places.

    `starts` marks what begins a document, and the first token of each row of each pass: whatever a row remembers then
    is from elsewhere in the text.
    """

    def __init__(
        self,
        ids: NDArray[Any],
        starts: NDArray[np.int64] | Sequence[int],
        batch: int,
        fingerprint: str = "",
        name: str = "the text",
    ) -> None:
        self.ids, self.fingerprint, self.name = ids, fingerprint, name
        self.document_starts = np.asarray(starts, np.int64)
        self.passes = 0
        self._whole = [(0, len(ids) - 1)]
        self._lay(self._whole, batch)

    def _lay(self, stretches: Sequence[tuple[int, int]], batch: int) -> None:
        """Puts stretches of predictions end to end and cuts them into rows."""
        lengths = np.array([stop - start for start, stop in stretches], np.int64)
        if batch < 1:
            raise DataError(f"a batch has at least one row, not {batch}")
        if lengths.sum() < batch:
            raise DataError(
                f"{self.name} has {len(self.ids):,} tokens, too few for a batch of {batch} rows; "
                f"give it more text, or a smaller batch"
            )
        self.stretches, self.batch, self.position = list(stretches), batch, 0
        self.row_length = int(lengths.sum()) // batch
        # Prediction v of the stretches end to end is that of token v + shift[k], where k is the stretch it lies in.
        self._begins = np.cumsum(lengths) - lengths
        self._shift = np.array([start for start, _ in stretches], np.int64) - self._begins

    def next(self, segment: int) -> Batch:
        """The next `segment` tokens of every row, or as many as are left of the pass."""
        if segment < 1:
            raise DataError(f"a segment has at least one token, not {segment}")
        if self.position == self.row_length:
            self.passes += 1
            self._lay(self._whole, self.batch)
        length = min(segment, self.row_length - self.position)
        rows = np.arange(self.batch, dtype=np.int64)[:, None] * self.row_length
        virtual = rows + np.arange(self.position, self.position + length, dtype=np.int64)
        stretch = np.searchsorted(self._begins, virtual, side="right") - 1
        at = virtual + self._shift[stretch]
        begins = (virtual == self._begins[stretch]) | np.isin(at, self.document_starts)
        begins[:, 0] |= self.position == 0
        self.position += length
        return Batch(self.ids[at].astype(np.int64), self.ids[at + 1].astype(np.int64), begins)

    def rebatch(self, batch: int) -> None:
        """Goes on with another number of rows: what this pass has not read yet is cut anew."""
        if batch == self.batch:
            return
        unread = []
        for row in range(self.batch):
            unread += self._real(row * self.row_length + self.position, (row + 1) * self.row_length)
        unread += self._real(self.batch * self.row_length, sum(stop - start for start, stop in self.stretches))
        if sum(stop - start for start, stop in unread) < batch:
            self.passes += 1
            unread = self._whole
        self._lay(unread, batch)

    def _real(self, first: int, last: int) -> list[tuple[int, int]]:
        """Predictions `first` to `last` of the stretches end to end, as stretches of the text."""
        found = []
        for begin, (start, stop) in zip(self._begins.tolist(), self.stretches, strict=True):
            low, high = max(first - begin, 0), min(last - begin, stop - start)
            if low < high:
                found.append((start + low, start + high))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the reading stands, in plain values, with the fingerprint of what is read."""
        return {
            "version": _VERSION,
            "fingerprint": self.fingerprint,
            "tokens": len(self.ids),
            "batch": self.batch,
            "passes": self.passes,
            "position": self.position,
            "stretches": [list(stretch) for stretch in self.stretches],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `state` was taken; another text, or the same one changed, is refused."""
        if state.get("version") != _VERSION:
            found = str(state.get("version"))[:40]
            raise DataError(f"this data position has format {found}; this longspan reads format {_VERSION}")
        if state.get("fingerprint") != self.fingerprint or state.get("tokens") != len(self.ids):
            raise DataError(
                f"{self.name} is not the text this run was trained on (fingerprint {self.fingerprint[:12] or 'none'}, "
                f"then {str(state.get('fingerprint'))[:12] or 'none'}); bring back the old text, or begin a new run"
            )
        try:
            batch, passes, position = (_whole_number(state[name]) for name in ("batch", "passes", "position"))
            stretches = [(_whole_number(start), _whole_number(stop)) for start, stop in state["stretches"]]
            ordered = all(0 <= start < stop < len(self.ids) for start, stop in stretches)
            row_length = sum(stop - start for start, stop in stretches) // batch
            if not ordered or batch < 1 or not 0 <= position <= row_length or row_length < 1:
                raise ValueError
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise DataError(f"the position in {self.name} that was saved is damaged; take an earlier one") from None
        self._lay(stretches, batch)
        self.passes, self.position = passes, position


def _whole_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value
