"""Encoded texts: token ids, encoded once, cached, memory-mapped, and encoded again when the text changes."""

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
    atomic_folder,
    cache_folder,
    digests,
    key,
    read_json,
    remove_folder,
    signature,
    sync,
    write_json,
)
from longspan.data.encoding import encode_pieces
from longspan.data.json_lines import warn_about_json_lines
from longspan.data.sources import Source, find_source
from longspan.data.splits import ByName, Piece, describe_splits, split_pieces
from longspan.data.tokenizer_specs import TokenizerSpec, find_tokenizer_spec
from longspan.errors import CheckpointError, DataError
from longspan.tokenizers import Ids, Tokenizer, tokenizer_from_dict
from longspan.tokenizers.text import read_blocks

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Excerpt:
    """Token ids and the sorted offsets at which documents start."""

    ids: Ids
    starts: NDArray[np.int64]

    def excerpt(self, begin: int = 0, end: int | None = None) -> "Excerpt":
        """The tokens from `begin` up to `end` (default: the end of the text), and where documents start in them."""
        stop = len(self.ids) if end is None else min(end, len(self.ids))
        inside = self.starts[(self.starts >= begin) & (self.starts < stop)]
        return Excerpt(self.ids[begin:stop], inside - begin)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text as token ids.

    `starts` are the sorted offsets of the first token of each document; the first is 0. `fingerprint` identifies ids,
    documents and tokenizer. `bytes` is the size of the text. `splits` lists the files of each split, and files in no
    split as `unused`; it is empty for known corpora and for a single file.
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

    def excerpt(self, begin: int = 0, end: int | None = None) -> Excerpt:
        return Excerpt(self.ids, self.starts).excerpt(begin, end)

    def describe_files(self, *splits: str) -> list[str]:
        """One line per split with the names of its files; splits without files are left out."""
        return [f"{split}: {_join_names(self.splits[split])}" for split in splits if self.splits.get(split)]


def open_corpus(
    name_or_path: str | Path,
    split: str | None = None,
    tokenizer: Tokenizer | TokenizerSpec | str | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    held_out: Mapping[str, str | Path] | None = None,
) -> Encoded:
    """Encode a known corpus, a file, an archive or a folder: all of it, or its train, valid or test split.

    In a folder, files and top-level folders named train, test, and valid, val, dev or validation are that split.
    `held_out` gives other files or folders for valid or test. They are not part of the text without a split.

    `tokenizer` is a tokenizer, a TokenizerSpec or the name of one ("bytes", "characters", "words", ...). Default: that
    of the corpus, and bytes for files and folders. A spec builds its vocabulary from the training split. If a spec is
    given and no split, it builds it from all of the text.
    """
    root = cache_folder(cache)
    given = {name: str(path) for name, path in (held_out or {}).items() if split is not None}
    source = find_source(name_or_path, root, given)
    paths = [document.path for document in source.documents]
    before = [signature(path) for path in paths]
    contents = digests(paths, root)
    spec = tokenizer if tokenizer is not None else source.tokenizer
    if isinstance(spec, str):
        spec = find_tokenizer_spec(spec)
    pieces = split_pieces(source.name, source.documents, source.split, split, spec.unit)
    if isinstance(spec, TokenizerSpec):
        identity: Any = dataclasses.asdict(spec)
        vocabulary_splits = spec.vocabulary_splits if split or tokenizer is None else (None,)
        chosen = _build_tokenizer(source, spec, vocabulary_splits, contents, root)
    else:
        identity, chosen = spec.fingerprint, spec
    ranges = _byte_ranges(source, pieces)
    names = [document.name for document in source.documents]
    family = key(str(source.root), source.name, split, identity, *given.items())
    target = root / "encoded" / f"{family}-{key(_FORMAT, names, contents, ranges, chosen.fingerprint)}"
    size = sum(piece.size for piece in pieces)
    found = _load(target, source.name, split, chosen, size)
    while found is None:
        if target.exists():
            remove_folder(target)
        with atomic_folder(target) as folder:
            _write(folder, pieces, chosen, workers)
            if [signature(path) for path in paths] != before:
                raise DataError(f"{source.name} changed while it was read; try again when no process writes to it")
        for stale in target.parent.glob(f"{family}-*"):
            if stale != target:
                remove_folder(stale)
        found = _load(target, source.name, split, chosen, size)
    if not len(found):
        raise DataError(f"{source.name} has no tokens with this tokenizer; add text or choose another tokenizer")
    if not isinstance(source.split, ByName):
        return found
    warn_about_json_lines(source.documents)
    several = len(source.documents) > 1
    splits = describe_splits(source.documents, source.split, spec.unit) if several else {}
    return dataclasses.replace(found, splits=splits)


def _join_names(names: Sequence[str], most: int = 5) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _byte_ranges(source: Source, pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Pieces as plain values: the index of the document in its corpus, and the piece's first and last byte."""
    index_of = {document.path: k for k, document in enumerate(source.documents)}
    return [(index_of[piece.path], piece.start, piece.stop) for piece in pieces]


def _build_tokenizer(
    source: Source, spec: TokenizerSpec, splits: Sequence[str | None], contents: Sequence[str], root: Path
) -> Tokenizer:
    """The tokenizer of a spec, built from some splits of a corpus. It is cached, because building it reads the text."""
    if spec.kind == "bytes":
        return spec.build([])
    parts = [split_pieces(source.name, source.documents, source.split, part, spec.unit) for part in splits]
    pieces = [piece for part in parts for piece in part]
    path = root / "tokenizers" / f"{key(dataclasses.asdict(spec), contents, _byte_ranges(source, pieces))}.json"
    cached = read_json(path)
    try:
        found = tokenizer_from_dict(cached["tokenizer"])
        if found.fingerprint != cached["fingerprint"]:
            raise CheckpointError(f"{path} was changed")
        return found
    except (CheckpointError, LookupError, TypeError):
        built = spec.build(pieces)
        write_json(path, {"fingerprint": built.fingerprint, "tokenizer": built.to_dict()})
        return built


def _write(folder: Path, pieces: Sequence[Piece], tokenizer: Tokenizer, workers: int | None) -> None:
    """Encode pieces and write the files of the encoded text."""
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


def _load(folder: Path, name: str, split: str | None, tokenizer: Tokenizer, size: int) -> Encoded | None:
    """The encoded text in `folder`, made from `size` bytes; None if it is missing or its hash does not match.

    Hashing takes 0.07 s for 100 MB on a CPU with SHA instructions, 0.2 s on others.
    """
    about = read_json(folder / "about.json")
    try:
        tokens, fingerprint = int(about["tokens"]), str(about["fingerprint"])
        dtype = tokenizer.dtype.newbyteorder("<")
        if (folder / "ids.bin").stat().st_size != tokens * dtype.itemsize or about["bytes"] != size:
            return None
        starts = np.load(folder / "starts.npy", allow_pickle=False)
        digest = hashlib.sha256(tokenizer.fingerprint.encode("ascii"))
        for block in read_blocks(folder / "ids.bin"):
            digest.update(block)
        digest.update(starts.tobytes())
        if digest.hexdigest() != fingerprint or starts.dtype != np.dtype("<i8") or starts.ndim != 1:
            return None
        ids: Ids = np.memmap(folder / "ids.bin", dtype, "r") if tokens else np.empty(0, dtype)
    except (OSError, ValueError, TypeError, LookupError, EOFError, DataError):
        return None
    return Encoded(name, split, ids, starts, tokenizer, fingerprint, size)
