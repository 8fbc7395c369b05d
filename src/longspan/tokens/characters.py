"""Characters: the symbols a training text holds, each with a number."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import CheckpointError, DataError
from longspan.tokens.text import decode_utf8
from longspan.tokens.tokenizer import FORMAT, Ids, Tokenizer, Unit, stored

_UNKNOWN, _DROPPED = -1, -2
Alphabet = Literal["unicode", "bytes"]


@dataclass(frozen=True)
class CharacterTokenizer(Tokenizer):
    """Symbol k of `symbols` is token k; a character that is neither there nor in `dropped` is an error.

    `alphabet` says what a character is: a code point of a UTF-8 text, or a byte, written as the code point of the same
    number. With bytes and a dropped newline this is the authors' enwik8: prep_enwik8.py writes each byte as a decimal
    number and each newline as the end of a line, and their vocabulary then splits lines into numbers, so that newlines
    vanish (their data_utils.py adds no <eos> for enwik8 and text8).
    """

    symbols: str
    dropped: str = ""
    alphabet: Alphabet = "unicode"

    kind: ClassVar[str] = "characters"

    def __post_init__(self) -> None:
        both = self.symbols + self.dropped
        if not self.symbols:
            raise DataError("a character tokenizer needs at least one symbol; the text it was made from holds none")
        symbol, times = Counter(both).most_common(1)[0]
        if times > 1:
            raise DataError(f"the character {_name(symbol)} is listed {times} times; each symbol has one number")
        if self.alphabet == "bytes" and max(both) > "\xff":
            raise DataError(f"{_name(max(both))} is not a byte; symbols of an alphabet of bytes go up to 255")

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        by_count: bool = False,
        dropped: str = "",
        alphabet: Alphabet = "unicode",
    ) -> "CharacterTokenizer":
        """Symbols sorted by code point, or most frequent first (ties by first appearance, as the authors have it)."""
        kept = [symbol for symbol in counts if symbol not in dropped]
        ordered = sorted(kept, key=lambda symbol: -counts[symbol]) if by_count else sorted(kept)
        return cls("".join(ordered), dropped, alphabet)

    @property
    def unit(self) -> Unit:
        return "byte" if self.alphabet == "bytes" else "character"

    @property
    def size(self) -> int:
        return len(self.symbols)

    @cached_property
    def _table(self) -> NDArray[np.int32]:
        """Code point to id; the last entry stands for every code point beyond, of which bytes have none."""
        size = 256 if self.alphabet == "bytes" else ord(max(self.symbols + self.dropped)) + 2
        table = np.full(size, _UNKNOWN, np.int32)
        table[code_points(self.symbols)] = np.arange(self.size)
        table[code_points(self.dropped)] = _DROPPED
        return table

    @cached_property
    def _spelled(self) -> NDArray[np.uint32]:
        return code_points(self.symbols)

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", goes_on: bool = False) -> Iterator[Ids]:  # noqa: ARG002
        seen = 0
        for points in characters(blocks, self.alphabet, name):
            ids = self._table[np.minimum(points, points.dtype.type(len(self._table) - 1))]
            unknown = ids == _UNKNOWN
            if unknown.any():
                at = int(np.argmax(unknown))
                raise DataError(
                    f"{self.unit} {seen + at} of {name} is {_name(chr(points[at]))}, which is not among the "
                    f"{self.size} symbols of this tokenizer; make one from a text that has it, or read bytes"
                )
            seen += len(points)
            kept = ids[ids != _DROPPED] if self.dropped else ids
            yield kept.astype(self.dtype)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        points = self._spelled[self._checked(ids)]
        if self.alphabet == "bytes":
            return points.astype(np.uint8).tobytes()
        return points.astype("<u4").tobytes().decode("utf-32-le").encode("utf-8")

    def to_dict(self) -> dict[str, Any]:
        values = {"kind": self.kind, "format": FORMAT, "symbols": self.symbols}
        return {**values, "dropped": self.dropped, "alphabet": self.alphabet}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CharacterTokenizer":
        symbols, dropped = stored(values, "symbols", str), stored(values, "dropped", str)
        alphabet = stored(values, "alphabet", str)
        if alphabet not in ("unicode", "bytes"):
            raise CheckpointError(f"the stored tokenizer has alphabet={alphabet[:40]!r}, not 'unicode' or 'bytes'")
        if surrogate := next((c for c in symbols + dropped if "\ud800" <= c <= "\udfff"), ""):
            raise CheckpointError(f"the stored tokenizer lists {_name(surrogate)}, which is no character")
        try:
            return cls(symbols, dropped, alphabet)
        except DataError as error:
            raise CheckpointError(f"the stored tokenizer is damaged: {error}") from None


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def characters(blocks: Iterable[bytes], alphabet: Alphabet, name: str) -> Iterator[NDArray[Any]]:
    """The code points of a text, or its bytes, a block at a time."""
    if alphabet == "bytes":
        return (np.frombuffer(block, np.uint8) for block in blocks)
    return (code_points(text) for text in decode_utf8(blocks, name))


def count_characters(blocks: Iterable[bytes], alphabet: Alphabet = "unicode", name: str = "the text") -> dict[str, int]:
    """How often each character occurs, in the order of first appearance."""
    counts = np.zeros(sys.maxunicode + 1, np.int64)
    order: list[int] = []
    for points in characters(blocks, alphabet, name):
        new = points[counts[points] == 0]
        if new.size:
            found, first = np.unique(new, return_index=True)
            order += found[np.argsort(first)].tolist()
        times = np.bincount(points)
        counts[: len(times)] += times
    return {chr(point): int(counts[point]) for point in order}


def _name(character: str) -> str:
    return f"{character!r} (U+{ord(character):04X})"
