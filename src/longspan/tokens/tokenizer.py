"""What every way of reading a text has in common."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import CheckpointError, DataError
from longspan.tokens.text import read_blocks, to_bytes

FORMAT = 1
Unit = Literal["byte", "character", "word"]
Ids = NDArray[Any]


class Tokenizer(ABC):
    """A text as ids and back; immutable, so that a model and its data can be held to the same one.

    A kind writes `encode_stream`, `decode_bytes`, `to_dict` and `from_dict`; the rest follows.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def unit(self) -> Unit:
        """What one token is, for the name of a score (bits per byte, bits per character, perplexity)."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ids there are."""

    @abstractmethod
    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", goes_on: bool = False) -> Iterator[Ids]:
        """The ids of a text that arrives in blocks, in memory that does not grow with its length.

        `goes_on` says that the end of the blocks is not the end of the text: what an end would add is left out.
        """

    @abstractmethod
    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The text of some ids as bytes, so that a writer can hold back those that do not yet make UTF-8.

        Piece by piece gives what the whole gives: decode_bytes(a) + decode_bytes(b) == decode_bytes(a + b).
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold and `tokenizer_from_dict` turns back."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer of a dict that says it is of this kind; anything odd in it is a CheckpointError."""

    def encode(self, text: str | bytes) -> Ids:
        """The ids of a whole text, in the smallest of uint8, uint16 and int32 that holds them."""
        return self._joined(self.encode_stream([to_bytes(text)]))

    def encode_prompt(self, text: str | bytes) -> Ids:
        """The ids of a text that is to be continued: a last line that has not ended gets no end."""
        return self._joined(self.encode_stream([to_bytes(text)], goes_on=True))

    def encode_chunks(self, path: Path) -> Iterator[Ids]:
        """The ids of a file, a chunk at a time."""
        return self.encode_stream(read_blocks(path), str(path))

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids; bytes that make no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint8, uint16 and int32 that holds every id."""
        return np.dtype(np.uint8 if self.size <= 1 << 8 else np.uint16 if self.size <= 1 << 16 else np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what `to_dict` gives: equal for tokenizers that read alike."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode("ascii")).hexdigest()

    def _joined(self, chunks: Iterable[Ids]) -> Ids:
        return np.concatenate([np.empty(0, self.dtype), *chunks])

    def _checked(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Ids as a flat array of integers, every one of them known."""
        array = np.asarray(ids)
        if array.size and array.dtype.kind not in "iu":
            raise DataError(f"token ids are whole numbers; these are {array.dtype}")
        array = array.reshape(-1).astype(np.int64, copy=False)
        bad = (array < 0) | (array >= self.size)
        if bad.any():
            raise DataError(f"there is no token {array[bad][0]}; this tokenizer has 0 to {self.size - 1}")
        return array


def stored(values: Mapping[str, Any], key: str, expected: type) -> Any:
    """A value of a stored tokenizer, of the type it must have."""
    value = values.get(key)
    # bool is an int to Python and must not pass for one.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise CheckpointError(
            f"the stored tokenizer has {key}={str(value)[:40]!r}, not a {expected.__name__}; it is damaged or foreign"
        )
    return value
