"""Tokenizer: the interface of all tokenizers."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import CheckpointError, DataError
from longspan.tokenizers.text import read_blocks, to_bytes

FORMAT = 1
Unit = Literal["byte", "character", "word", "subword"]
Ids = NDArray[Any]
Offsets = NDArray[np.int64]
"""[T, 2]: the first byte of each token and the byte after its last."""


class Tokenizer(ABC):
    """Converts text to ids and back. Immutable; its fingerprint ties a model to its data.

    Subclasses implement `unit`, `size`, `encode_stream`, `decode_bytes`, `to_dict` and `from_dict`.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def unit(self) -> Unit:
        """The unit of a token. It decides the metric: bits per byte, bits per character or perplexity."""

    @property
    def document_end_id(self) -> int | None:
        """The token that is added after every document of a corpus, or None. `encode` does not add it."""
        return None

    @property
    def unknown(self) -> int | None:
        """The id of what is not in the vocabulary, or None."""
        return None

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ids."""

    def token_id(self, token: str) -> int | None:  # noqa: ARG002
        """The id of a special token such as [MASK], or None if the tokenizer has no such token."""
        return None

    @abstractmethod
    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", partial: bool = False) -> Iterator[Ids]:
        """Encode a text given in blocks, in constant memory.

        `partial` means that the text continues after the blocks, so no end-of-line token is added at the end.
        """

    @abstractmethod
    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The text of some ids as bytes, so that a caller can hold back incomplete UTF-8.

        Decoding in pieces gives the same bytes: decode_bytes(a) + decode_bytes(b) == decode_bytes(a + b).
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The tokenizer as JSON values, for `tokenizer_from_dict`."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer of a `to_dict` of this kind. Invalid values are a CheckpointError."""

    def encode(self, text: str | bytes) -> Ids:
        """The ids of a complete text, in the tokenizer's dtype."""
        return self._concatenate(self.encode_stream([to_bytes(text)]))

    def encode_with_offsets(self, text: str | bytes) -> tuple[Ids, Offsets]:
        """The ids of a complete text, and the bytes [begin, end) of the text that each token was made from.

        Offsets are sorted and do not overlap. Bytes between them are those that the tokenizer drops, for example spaces
        between words. A token that stands for nothing in the text (the end of a last line without a newline) is empty.
        """
        data = to_bytes(text)
        ids = self.encode(data)
        found = self._lossless_offsets(data, ids)
        if found is None:
            raise DataError(
                f"the tokenizer ({self.kind}) is not lossless, so its tokens have no offsets in the text; use a "
                "lossless one, such as bytes"
            )
        return ids, found

    def _lossless_offsets(self, data: bytes, ids: Ids) -> Offsets | None:
        """The offsets if the tokens decode to exactly the text, else None."""
        if self.decode_bytes(ids) != data:
            return None
        used, place = np.unique(ids, return_inverse=True)
        sizes = np.array([len(self.decode_bytes([k])) for k in used], np.int64)[place]
        return offsets_of_sizes(sizes)

    def encode_prompt(self, text: str | bytes) -> Ids:
        """The ids of a text that will be continued: no end-of-line token after an unfinished last line."""
        return self._concatenate(self.encode_stream([to_bytes(text)], partial=True))

    def encode_many(self, texts: Sequence[bytes], name: str = "the text", partial: bool = False) -> list[Ids]:
        """The ids of several texts."""
        return [self._concatenate(self.encode_stream([text], name, partial)) for text in texts]

    def encode_chunks(self, path: Path) -> Iterator[Ids]:
        """The ids of a file, in chunks."""
        return self.encode_stream(read_blocks(path), str(path))

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids. Invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint8, uint16 and int32 that holds every id."""
        return np.dtype(np.uint8 if self.size <= 1 << 8 else np.uint16 if self.size <= 1 << 16 else np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of `to_dict`: equal tokenizers have equal fingerprints."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode("ascii")).hexdigest()

    def _concatenate(self, chunks: Iterable[Ids]) -> Ids:
        return np.concatenate([np.empty(0, self.dtype), *chunks])

    def _check_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Ids as a flat integer array. Ids outside the vocabulary are an error."""
        array = np.asarray(ids)
        if array.size and array.dtype.kind not in "iu":
            raise DataError(f"token ids have dtype {array.dtype}; pass integers")
        array = array.reshape(-1).astype(np.int64, copy=False)
        bad = (array < 0) | (array >= self.size)
        if bad.any():
            raise DataError(f"there is no token {array[bad][0]}; this tokenizer has ids 0 to {self.size - 1}")
        return array


def offsets_of_sizes(sizes: NDArray[np.int64]) -> Offsets:
    """The offsets of consecutive tokens of these sizes."""
    ends = np.cumsum(sizes)
    return np.stack([ends - sizes, ends], axis=1)


def stored_value(values: Mapping[str, Any], key: str, expected: type) -> Any:
    """A value of a stored tokenizer, checked to have the expected type."""
    value = values.get(key)
    # In Python, bool is a subclass of int.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise CheckpointError(
            f"the stored tokenizer has {key}={str(value)[:40]!r}, not a {expected.__name__}; "
            "it is damaged or from another program"
        )
    return value
