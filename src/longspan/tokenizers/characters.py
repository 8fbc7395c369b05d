"""CharacterTokenizer: the characters (or bytes) of a training text are the vocabulary."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import CheckpointError, DataError
from longspan.tokenizers.text import decode_utf8, to_bytes
from longspan.tokenizers.tokenizer import FORMAT, Ids, Offsets, Tokenizer, Unit, offsets_of_sizes, stored_value

_UNKNOWN, _DROPPED = -1, -2
Alphabet = Literal["unicode", "bytes"]


@dataclass(frozen=True)
class CharacterTokenizer(Tokenizer):
    """Symbol k of `symbols` has id k. A character that is neither in `symbols` nor in `dropped` is an error.

    `alphabet` defines a character: a code point of UTF-8 text, or a byte, written as the code point of that value.
    Bytes with a dropped newline give the authors' enwik8: prep_enwik8.py writes each byte as a decimal number and each
    newline as a line end, and their vocabulary splits lines into numbers, so newlines are lost (data_utils.py adds no
    <eos> for enwik8 and text8).
    """

    symbols: str
    dropped: str = ""
    alphabet: Alphabet = "unicode"

    kind: ClassVar[str] = "characters"

    def __post_init__(self) -> None:
        both = self.symbols + self.dropped
        if not self.symbols:
            raise DataError("a character tokenizer needs at least one symbol; the text it was built from has none")
        symbol, times = Counter(both).most_common(1)[0]
        if times > 1:
            raise DataError(f"the character {_describe(symbol)} is listed {times} times; list each symbol once")
        if self.alphabet == "bytes" and max(both) > "\xff":
            raise DataError(f"{_describe(max(both))} is not a byte; with alphabet='bytes', symbols must be at most 255")

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        by_count: bool = False,
        dropped: str = "",
        alphabet: Alphabet = "unicode",
    ) -> "CharacterTokenizer":
        """Symbols sorted by code point, or by count (ties by first appearance, like the authors' code)."""
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
    def _id_table(self) -> NDArray[np.int32]:
        """Maps code points to ids. For unicode, the last entry is used for all higher code points."""
        size = 256 if self.alphabet == "bytes" else ord(max(self.symbols + self.dropped)) + 2
        table = np.full(size, _UNKNOWN, np.int32)
        table[code_points(self.symbols)] = np.arange(self.size)
        table[code_points(self.dropped)] = _DROPPED
        return table

    @cached_property
    def _code_points(self) -> NDArray[np.uint32]:
        return code_points(self.symbols)

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", partial: bool = False) -> Iterator[Ids]:  # noqa: ARG002
        seen = 0
        for points in decode_blocks(blocks, self.alphabet, name):
            ids = self._id_table[np.minimum(points, points.dtype.type(len(self._id_table) - 1))]
            unknown = ids == _UNKNOWN
            if unknown.any():
                at = int(np.argmax(unknown))
                raise DataError(
                    f"{self.unit} {seen + at} of {name} is {_describe(chr(points[at]))}, which is not among the "
                    f"{self.size} symbols of this tokenizer; build one from a text that contains it, or use the "
                    "tokenizer 'bytes'"
                )
            seen += len(points)
            kept = ids[ids != _DROPPED] if self.dropped else ids
            yield kept.astype(self.dtype)

    def encode_with_offsets(self, text: str | bytes) -> tuple[Ids, Offsets]:
        data = to_bytes(text)
        ids, blocks = self.encode(data), decode_blocks([data], self.alphabet, "the text")
        points = np.concatenate([code_points(""), *blocks])
        sizes = np.ones(len(points), np.int64) if self.alphabet == "bytes" else utf8_sizes(points)
        kept = ~np.isin(points, code_points(self.dropped))
        return ids, offsets_of_sizes(sizes)[kept]

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        points = self._code_points[self._check_ids(ids)]
        if self.alphabet == "bytes":
            return points.astype(np.uint8).tobytes()
        return points.astype("<u4").tobytes().decode("utf-32-le").encode("utf-8")

    def to_dict(self) -> dict[str, Any]:
        values = {"kind": self.kind, "format": FORMAT, "symbols": self.symbols}
        return {**values, "dropped": self.dropped, "alphabet": self.alphabet}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CharacterTokenizer":
        symbols, dropped = stored_value(values, "symbols", str), stored_value(values, "dropped", str)
        alphabet = stored_value(values, "alphabet", str)
        if alphabet not in ("unicode", "bytes"):
            raise CheckpointError(f"the stored tokenizer has alphabet={alphabet[:40]!r}, not 'unicode' or 'bytes'")
        if surrogate := next((c for c in symbols + dropped if "\ud800" <= c <= "\udfff"), ""):
            raise CheckpointError(
                f"the stored tokenizer lists {_describe(surrogate)}, which is not a character; it is damaged"
            )
        try:
            return cls(symbols, dropped, alphabet)
        except DataError as error:
            raise CheckpointError(f"the stored tokenizer is damaged: {error}") from None


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def utf8_sizes(points: NDArray[Any]) -> NDArray[np.int64]:
    """The number of bytes of each code point in UTF-8. An escaped byte (U+DC80 to U+DCFF) is one byte."""
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.where((points >= 0xDC80) & (points <= 0xDCFF), 1, sizes)


def decode_blocks(blocks: Iterable[bytes], alphabet: Alphabet, name: str) -> Iterator[NDArray[Any]]:
    """The code points of a text, or its bytes, block by block."""
    if alphabet == "bytes":
        return (np.frombuffer(block, np.uint8) for block in blocks)
    return (code_points(text) for text in decode_utf8(blocks, name))


def count_characters(blocks: Iterable[bytes], alphabet: Alphabet = "unicode", name: str = "the text") -> dict[str, int]:
    """The number of occurrences of each character, in the order of first appearance."""
    counts = np.zeros(sys.maxunicode + 1, np.int64)
    order: list[int] = []
    for points in decode_blocks(blocks, alphabet, name):
        new = points[counts[points] == 0]
        if new.size:
            found, first = np.unique(new, return_index=True)
            order += found[np.argsort(first)].tolist()
        times = np.bincount(points)
        counts[: len(times)] += times
    return {chr(point): int(counts[point]) for point in order}


def _describe(character: str) -> str:
    return f"{character!r} (U+{ord(character):04X})"
