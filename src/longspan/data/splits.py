"""Documents, and the rules that divide them into train, valid and test splits."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from longspan.errors import DataError, UnknownNameError
from longspan.tokenizers import Unit

SPLITS = ("train", "valid", "test")
HELD_OUT = SPLITS[1:]
_SPLIT_NAMES = {"train": "train", "test": "test", **dict.fromkeys(("valid", "val", "dev", "validation"), "valid")}
_SHARD = re.compile(r"([a-z]+)-\d+-of-\d+(-[0-9a-f]+)?")
_SMALL = 1 << 20
_WHITESPACE = b" \t\n\r\x0b\x0c"


class EmptySplitError(DataError):
    """A split without text, of a corpus that has some. `files` are named after the split and empty."""

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.files = tuple(files)


@dataclass(frozen=True)
class Document:
    """A file that is one document or, if it has a `field`, JSON lines with a document in that field of every row.

    `name` is relative to the corpus, so it does not depend on where the corpus is. `split` is the split the file is
    named after, or None. `path` may be a file of the cache; `shown` is the user's file, which errors name.
    """

    name: str
    path: Path
    size: int
    split: str | None = None
    field: str | None = None
    shown: str = ""


@dataclass(frozen=True)
class Piece:
    """The part of a document that belongs to a split, in bytes. Memory is reset at its start."""

    path: Path
    start: int
    stop: int
    field: str | None = None
    shown: str = ""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ByPercent:
    """Every document is divided by bytes: train first, then valid, then test."""

    valid_percent: int = 5
    test_percent: int = 5

    def pieces(self, documents: Sequence[Document], split: str, unit: Unit) -> list[Piece]:
        found: list[Piece] = []
        for document in documents:
            size = document.size
            first = size - size * (self.valid_percent + self.test_percent) // 100
            second = size - size * self.test_percent // 100
            if rows := _few_rows(document):
                held = (max(1, len(rows) * percent // 100) for percent in (self.valid_percent, self.test_percent))
                valid, test = held
                first, second = rows[-valid - test], rows[-test]
            found += _divide(document, first, second, split, unit)
        return found


@dataclass(frozen=True)
class ByTail:
    """One document: its last bytes are test and those before are valid. `trimmed` strips whitespace from each split."""

    valid: int = 5_000_000
    test: int = 5_000_000
    trimmed: bool = False

    def pieces(self, documents: Sequence[Document], split: str, unit: Unit) -> list[Piece]:
        document = documents[0]
        if document.size <= self.valid + self.test:
            raise DataError(
                f"{document.path} has {document.size:,} bytes, too few to hold out {self.valid + self.test:,}; use "
                "the complete file"
            )
        first, second = document.size - self.valid - self.test, document.size - self.test
        pieces = _divide(document, first, second, split, unit)
        return [_trim(piece) for piece in pieces] if self.trimmed else pieces


@dataclass(frozen=True)
class ByFile:
    """The files of each split by name; `*` stands for any characters."""

    train: str
    valid: str
    test: str

    def pieces(self, documents: Sequence[Document], split: str, _: Unit) -> list[Piece]:
        wanted = {"train": self.train, "valid": self.valid, "test": self.test}[split]
        return [full_piece(document) for document in documents if fnmatchcase(document.name, wanted)]


@dataclass(frozen=True)
class ByDocument:
    """Of every `period` documents in order, the last is test and the one before is valid.

    With fewer documents, the last one is test and the one before is valid. All splits are filled from three on.
    """

    period: int = 20

    def pieces(self, documents: Sequence[Document], split: str, _: Unit) -> list[Piece]:
        period = min(self.period, len(documents))
        ranges = {"train": range(max(1, period - 2)), "valid": range(max(1, period - 2), period - 1)}
        chosen = ranges.get(split, range(max(1, period - 1), period))
        return [full_piece(document) for k, document in enumerate(documents) if k % period in chosen]


@dataclass(frozen=True)
class ByCount:
    """A number of complete documents is held out, evenly spaced in order; those of valid are evenly spaced in these."""

    valid: int
    test: int

    def pieces(self, documents: Sequence[Document], split: str, _: Unit) -> list[Piece]:
        held = _evenly_spaced(self.valid + self.test, len(documents))
        valid = {held[k] for k in _evenly_spaced(self.valid, len(held))}
        chosen = {"valid": valid, "test": set(held) - valid, "train": set(range(len(documents))) - set(held)}[split]
        return [full_piece(document) for k, document in enumerate(documents) if k in chosen]


@dataclass(frozen=True)
class ByName:
    """A user's documents, each in the split it is named after.

    Documents without such a name are train, or unused if others are named train. If only valid is missing, it is the
    last `valid_percent` of the bytes of train. If valid and test are both missing, train is divided by document, or by
    bytes if it has fewer than three documents.
    """

    valid_percent: int = 5

    def pieces(self, documents: Sequence[Document], split: str, unit: Unit) -> list[Piece]:
        named: defaultdict[str | None, list[Document]] = defaultdict(list)
        for document in documents:
            named[document.split].append(document)
        train = named["train"] or named[None]
        if not named["valid"] and not named["test"]:
            return (ByPercent() if len(train) < 3 else ByDocument()).pieces(train, split, unit)
        if split == "test" or named["valid"]:
            return [full_piece(document) for document in (train if split == "train" else named[split])]
        return _end_as_valid(train, self.valid_percent, unit)[split]


SplitRule = ByPercent | ByTail | ByFile | ByDocument | ByCount | ByName


def named_split(name: str) -> str | None:
    """The split a file or folder is named after, by the part before its first dot, or None.

    `VAL.txt.gz` is valid, the folder `test` is test, and the shard `train-00000-of-00004.parquet` is train.
    """
    return _SPLIT_NAMES.get(name.partition(".")[0].lower()) or _shard_split(name)


def split_of_path(path: str) -> str | None:
    """The split of a file in a corpus: that of its top-level folder or, for a shard of a split, of any part of it."""
    top, *below = path.split("/")
    return named_split(top) or next(filter(None, map(_shard_split, below)), None)


def _shard_split(name: str) -> str | None:
    """The split in the name of a shard as Hugging Face `datasets` writes it, or None."""
    shard = _SHARD.fullmatch(name.partition(".")[0].lower())
    return _SPLIT_NAMES.get(shard[1]) if shard else None


def split_pieces(
    name: str, documents: Sequence[Document], rule: SplitRule, split: str | None, unit: Unit
) -> list[Piece]:
    """The pieces of a split that are not empty; all documents if `split` is None."""
    if split is not None and split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    if not documents:
        raise DataError(f"{name} is empty; use a text with at least one byte")
    pieces = [full_piece(d) for d in documents] if split is None else rule.pieces(documents, split, unit)
    if split is None and not any(piece.size for piece in pieces):
        raise DataError(f"{name} is empty; use a text with at least one byte")
    if not any(piece.size for piece in pieces):
        fix = "add text, or leave out the split"
        if any(document.split for document in documents):
            fix = f"add a file {split}.txt or a folder {split} to it, or set data.{split}"
            fix = "all of it is held out, so add text to train on" if split == "train" else fix
        files = [document.name for document in documents if document.split == split]
        fix = f"{files[0]} has no text, so add some or remove it" if files else fix
        total = f"{len(documents)} document{'s' * (len(documents) > 1)}, {sum(d.size for d in documents):,} bytes"
        raise EmptySplitError(f"the {split} split of {name} is empty ({total}); {fix}", files)
    return [piece for piece in pieces if piece.size]


def describe_splits(documents: Sequence[Document], rule: SplitRule, unit: Unit) -> dict[str, tuple[str, ...]]:
    """The names of the documents of each split, with the byte range of divided ones; `unused` are in no split."""
    pieces = {split: [piece for piece in rule.pieces(documents, split, unit) if piece.size] for split in SPLITS}
    known = {(document.path, document.shown): document for document in documents}  # equal files are one in the cache

    def name(piece: Piece) -> str:
        document = known[piece.path, piece.shown]
        cut = piece.size < document.size
        return document.name + (f" (bytes {piece.start:,} to {piece.stop:,})" if cut else "")

    found = {split: tuple(map(name, parts)) for split, parts in pieces.items()}
    used = {(piece.path, piece.shown) for parts in pieces.values() for piece in parts}
    return found | {"unused": tuple(d.name for d in documents if d.size and (d.path, d.shown) not in used)}


def full_piece(document: Document) -> Piece:
    return _piece(document, 0, document.size)


def _piece(document: Document, start: int, stop: int) -> Piece:
    return Piece(document.path, start, stop, document.field, document.shown)


def _evenly_spaced(count: int, size: int) -> list[int]:
    """The midpoints of `count` equal intervals of range(size); all of it if there are not more."""
    count = min(count, size)
    return [(2 * k + 1) * size // (2 * count) for k in range(count)]


def _end_as_valid(documents: Sequence[Document], percent: int, unit: Unit) -> dict[str, list[Piece]]:
    """The documents concatenated: the last bytes are valid and those before are train."""
    total = sum(document.size for document in documents)
    left = total - total * percent // 100
    found: dict[str, list[Piece]] = {"train": [], "valid": []}
    for document in documents:
        at = document.size if document.size <= left else _next_boundary(document, left, unit)
        left = max(0, left - document.size)
        found["train"].append(_piece(document, 0, at))
        found["valid"].append(_piece(document, at, document.size))
    return found


def _divide(document: Document, first: int, second: int, split: str, unit: Unit) -> list[Piece]:
    bounds = [0, _next_boundary(document, first, unit), _next_boundary(document, second, unit), document.size]
    k = SPLITS.index(split)
    return [_piece(document, bounds[k], bounds[k + 1])]


def _next_boundary(document: Document, at: int, unit: Unit) -> int:
    """The first position >= `at` that divides no token: any byte, the start of a character, or the start of a line.

    For JSON lines it is the start of a row.
    """
    if unit == "byte" and document.field is None:
        return at
    with document.path.open("rb") as file:
        file.seek(at)
        if unit == "character" and document.field is None:
            ahead = file.read(4)
            return at + next((k for k, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))
        file.seek(max(at - 1, 0))
        if at and file.read(1) != b"\n":
            while (line := file.readline(1 << 20)) and not line.endswith(b"\n"):
                pass
        return file.tell()


def _few_rows(document: Document) -> list[int]:
    """The offsets of the rows of a small file of JSON lines with three rows or more, else none.

    Division by bytes could leave splits of a few rows empty.
    """
    if document.field is None or document.size > _SMALL:
        return []
    with document.path.open("rb") as file:
        rows = [start for start, row in _lines(file) if row.strip()]
    return rows if len(rows) >= 3 else []


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    at = 0
    for line in file:
        yield at, line
        at += len(line)


def _trim(piece: Piece, reach: int = 4096) -> Piece:
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        head = file.read(min(reach, piece.size))
        file.seek(max(piece.start, piece.stop - reach))
        tail = file.read(piece.stop - file.tell())
    start = piece.start + len(head) - len(head.lstrip(_WHITESPACE))
    stop = max(start, piece.stop - len(tail) + len(tail.rstrip(_WHITESPACE)))
    return dataclasses.replace(piece, start=start, stop=stop)
