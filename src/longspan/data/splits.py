"""Documents, and how they divide into train, valid and test."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.errors import DataError, UnknownNameError
from longspan.tokens import Unit

SPLITS = ("train", "valid", "test")
HELD_OUT = SPLITS[1:]
_NAMES = {"train": "train", "test": "test", **dict.fromkeys(("valid", "val", "dev", "validation"), "valid")}
_WHITESPACE = b" \t\n\r\x0b\x0c"


@dataclass(frozen=True)
class Document:
    """A file that is one document, the name it is known by wherever its corpus lies, and the split it is named for."""

    name: str
    path: Path
    size: int
    split: str | None = None


@dataclass(frozen=True)
class Piece:
    """A stretch of a document that belongs to a split; where it begins, memory is forgotten."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ByShare:
    """Each document cut by bytes: unless told otherwise its last twentieth is test, the one before it valid."""

    valid_percent: int = 5
    test_percent: int = 5

    def pieces(self, documents: Sequence[Document], split: str, unit: Unit) -> list[Piece]:
        found: list[Piece] = []
        for document in documents:
            size = document.size
            first = size - size * (self.valid_percent + self.test_percent) // 100
            found += _cut(document, first, size - size * self.test_percent // 100, split, unit)
        return found


@dataclass(frozen=True)
class ByTail:
    """One document, its last bytes test and the ones before them valid; `trimmed` drops whitespace at both ends."""

    valid: int = 5_000_000
    test: int = 5_000_000
    trimmed: bool = False

    def pieces(self, documents: Sequence[Document], split: str, unit: Unit) -> list[Piece]:
        document = documents[0]
        if document.size <= self.valid + self.test:
            raise DataError(
                f"{document.path} has {document.size:,} bytes, too few to take {self.valid + self.test:,} from its end"
            )
        first, second = document.size - self.valid - self.test, document.size - self.test
        pieces = _cut(document, first, second, split, unit)
        return [_trimmed(piece) for piece in pieces] if self.trimmed else pieces


@dataclass(frozen=True)
class ByFile:
    """A file for each split."""

    train: str
    valid: str
    test: str

    def pieces(self, documents: Sequence[Document], split: str, _: Unit) -> list[Piece]:
        wanted = {"train": self.train, "valid": self.valid, "test": self.test}[split]
        return [whole(document) for document in documents if document.name == wanted]


@dataclass(frozen=True)
class ByDocument:
    """Of every twenty documents in order the last is test, the one before it valid.

    With fewer than twenty, the last document is test and the one before it valid. It takes three to fill all splits.
    """

    period: int = 20

    def pieces(self, documents: Sequence[Document], split: str, _: Unit) -> list[Piece]:
        period = min(self.period, len(documents))
        place = {"train": range(max(1, period - 2)), "valid": range(max(1, period - 2), period - 1)}
        taken = place.get(split, range(max(1, period - 1), period))
        return [whole(document) for k, document in enumerate(documents) if k % period in taken]


@dataclass(frozen=True)
class ByCount:
    """So many whole documents held out, spread evenly over all of them in order, those of valid evenly among these."""

    valid: int
    test: int

    def pieces(self, documents: Sequence[Document], split: str, _: Unit) -> list[Piece]:
        held = _spread(self.valid + self.test, len(documents))
        valid = {held[k] for k in _spread(self.valid, len(held))}
        places = {"valid": valid, "test": set(held) - valid, "train": set(range(len(documents))) - set(held)}[split]
        return [whole(document) for k, document in enumerate(documents) if k in places]


@dataclass(frozen=True)
class ByName:
    """The documents of a user, each in the split it is named for.

    Those that are named for none are train, unless some are named train: then they are in no split. Where only valid
    is missing it is the last `valid_percent` of train's bytes. Where valid and test are both missing, train is split as
    documents without names are: by document, or by bytes where there are fewer than three.
    """

    valid_percent: int = 5

    def pieces(self, documents: Sequence[Document], split: str, unit: Unit) -> list[Piece]:
        named: defaultdict[str | None, list[Document]] = defaultdict(list)
        for document in documents:
            named[document.split].append(document)
        train = named["train"] or named[None]
        if not named["valid"] and not named["test"]:
            return (ByShare() if len(train) < 3 else ByDocument()).pieces(train, split, unit)
        if split == "test" or named["valid"]:
            return [whole(document) for document in (train if split == "train" else named[split])]
        return _end_as_valid(train, self.valid_percent, unit)[split]


SplitRule = ByShare | ByTail | ByFile | ByDocument | ByCount | ByName


def named_split(name: str) -> str | None:
    """The split a file or folder is named for, by what comes before its first dot: val for VAL.txt.gz, test for test/.

    None for any other name.
    """
    return _NAMES.get(name.partition(".")[0].lower())


def split_pieces(
    name: str, documents: Sequence[Document], rule: SplitRule, split: str | None, unit: Unit
) -> list[Piece]:
    """What a split consists of, without its empty parts; all documents where no split is asked for."""
    if split is not None and split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    if not documents:
        raise DataError(f"{name} is empty; a text needs at least one byte")
    pieces = [whole(d) for d in documents] if split is None else rule.pieces(documents, split, unit)
    if split is None and not any(piece.size for piece in pieces):
        raise DataError(f"{name} is empty; a text needs at least one byte")
    if not any(piece.size for piece in pieces):
        way = "give it more text, or take it whole"
        if any(document.split for document in documents):
            way = f"name a file {split}.txt or a folder {split} in it, or set data.{split}"
            way = "all of it is held out; add text to train on" if split == "train" else way
        held = f"{len(documents)} document{'s' * (len(documents) > 1)}, {sum(d.size for d in documents):,} bytes"
        raise DataError(f"the {split} split of {name} is empty ({held}); {way}")
    return [piece for piece in pieces if piece.size]


def describe_splits(documents: Sequence[Document], rule: SplitRule, unit: Unit) -> dict[str, tuple[str, ...]]:
    """The documents of each split by name, with the bytes it has of those that are cut; `unused` are in no split."""
    pieces = {split: [piece for piece in rule.pieces(documents, split, unit) if piece.size] for split in SPLITS}
    known = {document.path: document for document in documents}

    def name(piece: Piece) -> str:
        document = known[piece.path]
        cut = piece.size < document.size
        return document.name + (f" (bytes {piece.start:,} to {piece.stop:,})" if cut else "")

    found = {split: tuple(map(name, parts)) for split, parts in pieces.items()}
    used = {piece.path for parts in pieces.values() for piece in parts}
    return found | {"unused": tuple(d.name for d in documents if d.size and d.path not in used)}


def whole(document: Document) -> Piece:
    return Piece(document.path, 0, document.size)


def _spread(count: int, among: int) -> list[int]:
    """The middles of `count` equal stretches of `among` places; every place where there are not more of them."""
    count = min(count, among)
    return [(2 * k + 1) * among // (2 * count) for k in range(count)]


def _end_as_valid(documents: Sequence[Document], percent: int, unit: Unit) -> dict[str, list[Piece]]:
    """Documents end to end, their last bytes valid and the ones before them train."""
    total = sum(document.size for document in documents)
    left = total - total * percent // 100
    found: dict[str, list[Piece]] = {"train": [], "valid": []}
    for document in documents:
        at = document.size if document.size <= left else _border(document, left, unit)
        left = max(0, left - document.size)
        found["train"].append(Piece(document.path, 0, at))
        found["valid"].append(Piece(document.path, at, document.size))
    return found


def _cut(document: Document, first: int, second: int, split: str, unit: Unit) -> list[Piece]:
    bounds = [0, _border(document, first, unit), _border(document, second, unit), document.size]
    k = SPLITS.index(split)
    return [Piece(document.path, bounds[k], bounds[k + 1])]


def _border(document: Document, at: int, unit: Unit) -> int:
    """The first place from `at` on where no token of that unit is cut: a byte, a character's or a line's beginning."""
    if unit == "byte":
        return at
    with document.path.open("rb") as file:
        file.seek(at)
        if unit == "character":
            ahead = file.read(4)
            return at + next((k for k, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))
        file.seek(max(at - 1, 0))
        if at and file.read(1) != b"\n":
            while (line := file.readline(1 << 20)) and not line.endswith(b"\n"):
                pass
        return file.tell()


def _trimmed(piece: Piece, reach: int = 4096) -> Piece:
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        head = file.read(min(reach, piece.size))
        file.seek(max(piece.start, piece.stop - reach))
        tail = file.read(piece.stop - file.tell())
    start = piece.start + len(head) - len(head.lstrip(_WHITESPACE))
    return Piece(piece.path, start, max(start, piece.stop - len(tail) + len(tail.rstrip(_WHITESPACE))))
