"""Encoded texts: made once, kept in the cache, mapped into memory, made again when the text changes."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.data.cache import (
    cache_folder,
    digests,
    key,
    new_folder,
    read_json,
    remove_folder,
    signature,
    sync,
    write_json,
)
from longspan.data.encoding import encode_pieces
from longspan.data.json_lines import warn_of_json_lines
from longspan.data.readings import Reading, find_reading
from longspan.data.sources import Source, find_source
from longspan.data.splits import ByName, Piece, describe_splits, split_pieces
from longspan.errors import CheckpointError, DataError
from longspan.tokens import Ids, Tokenizer, tokenizer_from_dict
from longspan.tokens.text import read_blocks

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text as ids.

    `starts` holds the offsets of the documents' first tokens, sorted, the first 0. `fingerprint` is the same wherever
    the same ids, documents and tokenizer are; `bytes` counts the text they were made from. `splits` names the files of
    each split, and those in none as `unused`; it is empty for known corpora and for a single file.
    """

    name: str
    split: str | None
    ids: Ids
    starts: NDArray[np.int64]
    tokenizer: Tokenizer
    fingerprint: str
    bytes: int
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def tell_files(self, *splits: str) -> list[str]:
        """A line for each of these splits with its files, where there is something to tell."""
        return [f"{split}: {_listed(self.splits[split])}" for split in splits if self.splits.get(split)]


def open_corpus(
    name_or_path: str | Path,
    split: str | None = None,
    tokenizer: Tokenizer | Reading | str | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    held_out: Mapping[str, str | Path] | None = None,
) -> Encoded:
    """A known corpus, a file, an archive or a folder as ids; the whole of it, or its train, valid or test split.

    Of a folder, files and top-level folders called train, test, and valid, val, dev or validation are that split.
    `held_out` gives files or folders for valid or test, to take in their place; they are no part of the whole.

    `tokenizer` is one that exists, or a reading to make one by ("bytes", "characters", "words", ...): the corpus's own
    unless told, and bytes for files and folders. A reading takes its symbols from the training split; one that is
    asked for takes them from the whole text where that is read whole.
    """
    root = cache_folder(cache)
    given = {name: str(path) for name, path in (held_out or {}).items() if split is not None}
    source = find_source(name_or_path, root, given)
    paths = [document.path for document in source.documents]
    before = [signature(path) for path in paths]
    contents = digests(paths, root)
    reading = tokenizer if tokenizer is not None else source.reading
    if isinstance(reading, str):
        reading = find_reading(reading)
    pieces = split_pieces(source.name, source.documents, source.split, split, reading.unit)
    if isinstance(reading, Reading):
        spec: Any = dataclasses.asdict(reading)
        counted = reading.counted if split or tokenizer is None else (None,)
        made = _tokenizer(source, reading, counted, contents, root)
    else:
        spec, made = reading.fingerprint, reading
    stretches = _stretches(source, pieces)
    names = [document.name for document in source.documents]
    family = key(str(source.root), source.name, split, spec, *given.items())
    place = root / "encoded" / f"{family}-{key(_FORMAT, names, contents, stretches, made.fingerprint)}"
    size = sum(piece.size for piece in pieces)
    found = _load(place, source.name, split, made, size)
    while found is None:
        if place.exists():
            remove_folder(place)
        with new_folder(place) as folder:
            _write(folder, pieces, made, workers)
            if [signature(path) for path in paths] != before:
                raise DataError(f"{source.name} changed while it was read; try again when nothing writes to it")
        for stale in place.parent.glob(f"{family}-*"):
            if stale != place:
                remove_folder(stale)
        found = _load(place, source.name, split, made, size)
    if not len(found):
        raise DataError(f"{source.name} holds no tokens in this reading; give it more text")
    if not isinstance(source.split, ByName):
        return found
    warn_of_json_lines(source.documents)
    several = len(source.documents) > 1
    splits = describe_splits(source.documents, source.split, reading.unit) if several else {}
    return dataclasses.replace(found, splits=splits)


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _stretches(source: Source, pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Pieces as plain values: the place of the document among those of its corpus, and where the piece lies in it."""
    place_of = {document.path: k for k, document in enumerate(source.documents)}
    return [(place_of[piece.path], piece.start, piece.stop) for piece in pieces]


def _tokenizer(
    source: Source, reading: Reading, counted: Sequence[str | None], contents: Sequence[str], root: Path
) -> Tokenizer:
    """The tokenizer a reading makes of some splits of a corpus, remembered because making it reads the text."""
    if reading.kind == "bytes":
        return reading.tokenizer([])
    parts = [split_pieces(source.name, source.documents, source.split, part, reading.unit) for part in counted]
    pieces = [piece for part in parts for piece in part]
    place = root / "tokenizers" / f"{key(dataclasses.asdict(reading), contents, _stretches(source, pieces))}.json"
    kept = read_json(place)
    try:
        found = tokenizer_from_dict(kept["tokenizer"])
        if found.fingerprint != kept["fingerprint"]:
            raise CheckpointError(f"{place} was changed")
        return found
    except (CheckpointError, LookupError, TypeError):
        made = reading.tokenizer(pieces)
        write_json(place, {"fingerprint": made.fingerprint, "tokenizer": made.to_dict()})
        return made


def _write(folder: Path, pieces: Sequence[Piece], tokenizer: Tokenizer, workers: int | None) -> None:
    """The files of an encoded text."""
    digest = hashlib.sha256(tokenizer.fingerprint.encode("ascii"))
    starts: list[int] = []
    tokens, last = 0, -1
    with (folder / "ids.bin").open("wb") as out:
        for index, ids in encode_pieces(pieces, tokenizer, workers):
            if not len(ids):
                continue
            if index != last:
                starts.append(tokens)
                last = index
            data = ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()
            out.write(data)
            digest.update(data)
            tokens += len(ids)
        out.flush()
        os.fsync(out.fileno())
    begins = np.array(starts, "<i8")
    digest.update(begins.tobytes())
    np.save(folder / "starts.npy", begins)
    sync(folder / "starts.npy")
    size = sum(piece.size for piece in pieces)
    about = {"format": _FORMAT, "tokens": tokens, "bytes": size, "fingerprint": digest.hexdigest()}
    write_json(folder / "about.json", about)


def _load(place: Path, name: str, split: str | None, tokenizer: Tokenizer, size: int) -> Encoded | None:
    """The encoded text at `place`, made from `size` bytes; None where there is none, or a changed one.

    All of it is hashed again: 0.07 s for 100 MB on a processor with SHA instructions, 0.2 s on others.
    """
    about = read_json(place / "about.json")
    try:
        tokens, fingerprint = int(about["tokens"]), str(about["fingerprint"])
        dtype = tokenizer.dtype.newbyteorder("<")
        if (place / "ids.bin").stat().st_size != tokens * dtype.itemsize or about["bytes"] != size:
            return None
        starts = np.load(place / "starts.npy", allow_pickle=False)
        digest = hashlib.sha256(tokenizer.fingerprint.encode("ascii"))
        for block in read_blocks(place / "ids.bin"):
            digest.update(block)
        digest.update(starts.tobytes())
        if digest.hexdigest() != fingerprint or starts.dtype != np.dtype("<i8") or starts.ndim != 1:
            return None
        ids: Ids = np.memmap(place / "ids.bin", dtype, "r") if tokens else np.empty(0, dtype)
    except (OSError, ValueError, TypeError, LookupError, EOFError, DataError):
        return None
    return Encoded(name, split, ids, starts, tokenizer, fingerprint, size)
