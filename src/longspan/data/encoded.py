"""Encoded texts: made once, kept in the cache, mapped into memory, made again when the text changes."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
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
from longspan.data.readings import Reading, find_reading
from longspan.data.sources import Source, find_source
from longspan.data.splits import Piece, split_pieces
from longspan.errors import CheckpointError, DataError
from longspan.tokens import Ids, Tokenizer, tokenizer_from_dict
from longspan.tokens.text import read_blocks

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text as ids.

    `starts` holds the offsets of the documents' first tokens, sorted, the first 0. `fingerprint` is the same wherever
    the same ids, documents and tokenizer are; `bytes` counts the text they were made from.
    """

    name: str
    split: str | None
    ids: Ids
    starts: NDArray[np.int64]
    tokenizer: Tokenizer
    fingerprint: str
    bytes: int

    def __len__(self) -> int:
        return len(self.ids)


def open_corpus(
    name_or_path: str | Path,
    split: str | None = None,
    tokenizer: Tokenizer | Reading | str | None = None,
    cache: Path | None = None,
    workers: int | None = None,
) -> Encoded:
    """A known corpus, a file, an archive or a folder as ids; the whole of it, or its train, valid or test split.

    `tokenizer` is one that exists, or a reading to make one by ("bytes", "characters", "words", ...): the corpus's own
    unless told, and bytes for files and folders. A reading takes its symbols from the training split; one that is
    asked for takes them from the whole text where that is read whole.
    """
    root = cache_folder(cache)
    source = find_source(name_or_path, root)
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
    place_of = {path: k for k, path in enumerate(paths)}
    stretches = [(place_of[piece.path], piece.start, piece.stop) for piece in pieces]
    names = [document.name for document in source.documents]
    family = key(str(source.root), source.name, split, spec)
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
    return found


def _tokenizer(
    source: Source, reading: Reading, counted: Sequence[str | None], contents: Sequence[str], root: Path
) -> Tokenizer:
    """The tokenizer a reading makes of some splits of a corpus, remembered because making it reads the text."""
    if reading.kind == "bytes":
        return reading.tokenizer([])
    place = root / "tokenizers" / f"{key(dataclasses.asdict(reading), repr(source.split), contents, counted)}.json"
    kept = read_json(place)
    try:
        found = tokenizer_from_dict(kept["tokenizer"])
        if found.fingerprint != kept["fingerprint"]:
            raise CheckpointError(f"{place} was changed")
        return found
    except (CheckpointError, LookupError, TypeError):
        parts = [split_pieces(source.name, source.documents, source.split, part, reading.unit) for part in counted]
        made = reading.tokenizer([piece for part in parts for piece in part])
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
