"""The surprisal of every token, word or line of a text, with offsets into the text."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from longspan.tokenizers.characters import code_points, utf8_sizes
from longspan.tokenizers.tokenizer import Offsets

Per = Literal["token", "word", "line", "document"]
COLUMNS = ("index", "byte_start", "byte_end", "char_start", "char_end", "tokens", "bits", "text")
_WORD, _LINE = re.compile(r"\S+"), re.compile(rb"[^\n]*\n|[^\n]+\Z")


@dataclass(frozen=True, eq=False)
class Surprisal:
    """The units of one text in order. Unit k is the bytes `data[slice(*byte_spans[k])]`.

    Every token belongs to exactly one unit, so the bits add up to those of the text. The first token of a text has no
    context and therefore no surprisal. Whitespace before a word counts towards the bits of the word, and a newline (LF
    or CRLF) towards those of its line, but offsets are those of the word or line itself. A token that crosses the end
    of a unit counts towards the unit in which it ends.

    Characters are code points. A byte that is not valid UTF-8 counts as one character. If a token is a part of a
    character, its characters are those that it touches.
    """

    per: Per
    data: bytes
    byte_spans: Offsets
    """[N, 2]: the first byte of each unit and the byte after its last."""
    character_spans: Offsets
    """The same in characters."""
    tokens: NDArray[np.int64]
    """Tokens with a surprisal."""
    bits: NDArray[np.float64]
    """NaN where `tokens` is 0."""

    def __len__(self) -> int:
        return len(self.bits)

    def text(self, k: int) -> str:
        """The text of a unit. Bytes that are not UTF-8, such as half a character, are written as \\xNN."""
        begin, end = self.byte_spans[k]
        return self.data[begin:end].decode("utf-8", errors="backslashreplace")

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict with the keys of COLUMNS per unit. `bits` is None where `tokens` is 0, `text` for a document."""
        whole = self.per == "document"
        numbers = (self.byte_spans.tolist(), self.character_spans.tolist(), self.tokens.tolist(), self.bits.tolist())
        for k, ((b, e), (c, d), tokens, bits) in enumerate(zip(*numbers, strict=True)):
            values = (k, b, e, c, d, tokens, bits if tokens else None, None if whole else self.text(k))
            yield dict(zip(COLUMNS, values, strict=True))


def surprisal(data: bytes, offsets: Offsets, losses: NDArray[np.float32], per: Per) -> Surprisal:
    """The surprisal of a text from the offsets of its tokens and their losses in nats, all but that of the first."""
    tokens = np.ones(len(offsets), np.int64)
    tokens[:1] = 0
    bits: NDArray[np.float64] = np.zeros(len(offsets))
    bits[1:] = losses.astype(np.float64) / math.log(2)
    places = _Characters(data)
    if per == "token":
        spans = offsets
    else:
        spans, ends = _units(data, per)
        unit = np.searchsorted(ends, np.maximum(offsets[:, 1], 1), side="left")
        unit = np.minimum(unit, len(spans) - 1)  # what follows the last unit belongs to it
        tokens = np.bincount(unit, tokens, len(spans)).astype(np.int64)
        bits = np.bincount(unit, bits, len(spans)).astype(np.float64)
    return Surprisal(per, data, spans, places.of(spans), tokens, np.where(tokens > 0, bits, np.nan))


def _units(data: bytes, per: Per) -> tuple[Offsets, NDArray[np.int64]]:
    """The offsets of the words or lines of a text, or of all of it, and where each one's tokens end."""
    spans: list[tuple[int, int]] = []
    if per == "word":
        text = data.decode("utf-8", errors="surrogateescape")
        places = _Characters(data).begins
        spans = [(int(places[m.start()]), int(places[m.end()])) for m in _WORD.finditer(text)]
        ends = [end for _, end in spans]
    elif per == "line":
        found = [m.span() for m in _LINE.finditer(data)]
        ends = [end for _, end in found]
        spans = [
            (begin, begin + len(data[begin:end].removesuffix(b"\r\n").removesuffix(b"\n"))) for begin, end in found
        ]
    if not spans:  # a document, or a text without words or lines
        spans, ends = [(0, len(data))], [len(data)]
    return np.array(spans, np.int64), np.array(ends, np.int64)


class _Characters:
    """Converts offsets in bytes to offsets in characters."""

    def __init__(self, data: bytes) -> None:
        text = data.decode("utf-8", errors="surrogateescape")
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") if text else code_points("")
        self.begins = np.concatenate([[0], np.cumsum(utf8_sizes(points))])
        """The first byte of every character, and the size of the text."""

    def of(self, spans: Offsets) -> Offsets:
        first = np.searchsorted(self.begins, spans[:, 0], side="right") - 1
        last = np.searchsorted(self.begins, spans[:, 1], side="left")
        return np.stack([first, last], axis=1)
