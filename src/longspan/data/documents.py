"""The documents in a range of a file: a plain text is one document, and every row of JSON lines is one."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longspan.data.splits import Piece
from longspan.errors import DataError
from longspan.tokenizers import Unit
from longspan.tokenizers.text import encoding_hint, read_blocks

TASK_BYTES = 4 << 20
_WINDOW, _AHEAD = 1 << 20, 1 << 16
_CACHED = 1 << 17  # arrays of this size stay in the cache of a core
_MISSING = object()
_LINE, _WORD, _SPACE = re.compile(rb"\S\n(?=\S)"), re.compile(rb"\S(?= \S)"), re.compile(rb"[ \n]")


class Chunk(NamedTuple):
    """A range of bytes of the piece of a file that begins at `origin`. `ends` is whether the piece ends with it.

    `field` is the key of the text in JSON lines, of which a chunk has complete rows, or None for plain text. Errors
    call the file `name`.
    """

    path: str
    origin: int
    start: int
    stop: int
    field: str | None
    ends: bool
    name: str

    @property
    def begins(self) -> bool:
        """Whether a document begins with the range."""
        return self.start == self.origin or self.field is not None

    @property
    def size(self) -> int:
        return self.stop - self.start


def tasks(pieces: Sequence[Piece], unit: Unit, size: int | None = None) -> Iterator[list[Chunk]]:
    """The text in lists of chunks with a few megabytes each: long pieces are cut between tokens, short ones grouped.

    The cuts depend on the pieces only, so a text has the same tokens with any number of processes.
    """
    size = size or TASK_BYTES
    task: list[Chunk] = []
    total = 0
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = _cut(piece, start + size, unit)
            ends = stop == piece.stop or piece.field is not None
            task.append(
                Chunk(str(piece.path), piece.start, start, stop, piece.field, ends, piece.shown or str(piece.path))
            )
            total, start = total + stop - start, stop
            if total >= size:
                yield task
                task, total = [], 0
    if task:
        yield task


def read_documents(chunk: Chunk) -> Iterator[bytes]:
    """The documents of a chunk, or the part of a document that it is."""
    path = Path(chunk.path)
    data = b"".join(read_blocks(path, chunk.start, chunk.stop, max(chunk.size, 1)))
    if chunk.field is None:
        yield data
        return
    at = chunk.start
    for row in data.split(b"\n"):
        if row.strip():
            yield _row_text(row, chunk, at)
        at += len(row) + 1


def count_words(data: bytes, begins: bool = True) -> int:
    """The number of words, separated by ASCII whitespace as `wc -w` does; `begins` is whether a word may begin at 0."""
    codes = np.frombuffer(data, np.uint8)
    count = 0
    for start in range(0, len(codes), _CACHED):
        block = codes[start : start + _CACHED]
        space = (block == 32) | (block - np.uint8(9) < 5)
        count += int(np.count_nonzero(space[:-1] > space[1:])) + int(begins and not space[0])
        begins = bool(space[-1])
    return count


def _nested(values: Any, keys: Sequence[str]) -> Any:
    """The value of a key in an object in an object, or _MISSING."""
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return _MISSING
        values = values[key]
    return values


def _row_text(row: bytes, chunk: Chunk, at: int) -> bytes:
    """The text of a row of JSON lines; null is an empty text."""
    field = chunk.field or ""
    try:
        values = json.loads(row)
        if not isinstance(values, dict):
            raise DataError("is not a JSON object; use a file with one object per line")
        text = values[field] if field in values else _nested(values, field.split("."))
        if text is _MISSING:
            known = ", ".join(repr(key)[:40] for key in list(values)[:8])
            raise DataError(
                f"has no field {field!r}; its fields are {known or 'none'}; select the one with the text with --field"
            )
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"has {str(text)[:40]!r} in the field {field!r}, which is not a string; use another --field"
            )
        return (text or "").encode()
    except UnicodeDecodeError as error:
        before = b"".join(read_blocks(Path(chunk.path), max(0, at - _CACHED), at))
        problem = f"is not UTF-8; {encoding_hint(before + row, len(before) + error.start)}"
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        problem = f"has a lone surrogate ({code}) in the field {field!r}, which UTF-8 cannot encode; remove it"
    except (ValueError, RecursionError):
        problem = "is not JSON; fix or remove it"
    except DataError as error:
        problem = str(error)
    lines = sum(block.count(b"\n") for block in read_blocks(Path(chunk.path), 0, at))
    raise DataError(f"line {lines + 1} of {chunk.name} {problem}")


def _cut(piece: Piece, at: int, unit: Unit) -> int:
    """The first position from `at` on where a chunk may end."""
    if at >= piece.stop:
        return piece.stop
    if piece.field is not None:
        return _search(piece, at - 1, re.compile(b"\n"))
    if unit == "byte":
        return at
    blocks = read_blocks(piece.path, at - 1, min(piece.stop, at + _WINDOW), _WINDOW + 1)
    window = next(blocks, b"")
    if unit == "word":  # preferably between lines, because a tokenizer may add a token to each
        return at + window.index(b"\n") if b"\n" in window else _search(piece, at, _SPACE)
    if unit == "subword" and (found := _LINE.search(window) or _WORD.search(window)):
        return at - 1 + found.end()
    return at - 1 + next((k for k in range(1, len(window)) if window[k] & 0xC0 != 0x80), len(window))


def _search(piece: Piece, at: int, pattern: re.Pattern[bytes]) -> int:
    """The end of the first match of a one-byte pattern from `at` on, or the end of the piece."""
    for block in read_blocks(piece.path, at, piece.stop, _AHEAD):
        if found := pattern.search(block):
            return at + found.end()
        at += len(block)
    return piece.stop
