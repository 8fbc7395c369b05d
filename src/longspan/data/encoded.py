"""Encoded texts: token ids, encoded once, cached, memory-mapped, and encoded again when the text changes."""

import contextlib
import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.data import documents
from longspan.data.cache import (
    cache_folder,
    digests,
    key,
    read_json,
    remove_folder,
    resumable_folder,
    scratch_folder,
    signature,
    write_json,
)
from longspan.data.documents import tasks
from longspan.data.encoding import (
    EncodedTask,
    Task,
    byte_workers,
    encode_task,
    encoder,
    run_in_threads,
    run_tasks,
    subword_workers,
    useful_workers,
)
from longspan.data.json_lines import warn_about_json_lines
from longspan.data.sources import Source, TextFormat, find_source
from longspan.data.splits import SPLITS, ByName, EmptySplitError, Piece, describe_splits, split_pieces
from longspan.data.tokenizer_specs import TokenizerSpec, find_tokenizer
from longspan.data.writer import ABOUT, FORMAT, IDS, STARTS, Writer
from longspan.errors import CheckpointError, DataError, DataWarning
from longspan.tokenizers import Ids, Tokenizer, WordTokenizer, tokenizer_from_dict
from longspan.tokenizers.text import read_blocks

_SAMPLE_BYTES = 1 << 16
_BLOCKS, _BLOCK_TOKENS = 64, 1 << 14

Progress = Callable[[int, int], None]


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
    documents and tokenizer. `bytes` is the size of the text and `words` the number of its words, separated by
    whitespace. `splits` lists the files of each split, and files in no split as `unused`.
    """

    name: str
    split: str | None
    ids: Ids
    starts: NDArray[np.int64]
    tokenizer: Tokenizer
    fingerprint: str
    bytes: int
    words: int = 0
    splits: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def excerpt(self, begin: int = 0, end: int | None = None) -> Excerpt:
        return Excerpt(self.ids, self.starts).excerpt(begin, end)

    @property
    def files(self) -> tuple[str, ...]:
        """The files of its split."""
        return self.splits.get(self.split or "", ())

    def by_sentence(self) -> "Encoded":
        """The same tokens with every sentence as a document, so that memory is empty at its start.

        The token before a sentence is also the end of the one before, so both ways score the same tokens.
        """
        boundary = self.tokenizer.boundary_id if isinstance(self.tokenizer, WordTokenizer) else None
        if boundary is None:
            raise DataError(
                f"{self.name} is encoded as {self.tokenizer.kind} without a token between sentences, such as the "
                "<S> of the tokenizer lm1b-authors; leave out --sentences (data.sentences in a recipe)"
            )
        starts = np.flatnonzero(self.ids[:-1] == boundary).astype(np.int64)
        fingerprint = hashlib.sha256(f"{self.fingerprint} by sentence".encode("ascii")).hexdigest()
        return dataclasses.replace(self, starts=starts, fingerprint=fingerprint)

    def reversed(self) -> "Encoded":
        """The same documents in reverse order, each from its last token to its first."""
        ends = np.append(self.starts[1:], len(self.ids))
        fingerprint = hashlib.sha256(f"{self.fingerprint} reversed".encode("ascii")).hexdigest()
        starts = np.sort(len(self.ids) - ends).astype(np.int64)
        return dataclasses.replace(self, ids=self.ids[::-1], starts=starts, fingerprint=fingerprint)

    def describe(self) -> str:
        """One line: the split, its tokens and its files."""
        return _describe(str(self.split), f"{len(self):,} tokens in ", self.files)


def open_each(text: Encoded, open_split: Callable[[str], Encoded]) -> dict[str, Encoded | DataError]:
    """Every split of a text, or the error that says why it has no tokens."""
    found: dict[str, Encoded | DataError] = {}
    for split in SPLITS:
        try:
            found[split] = text if split == text.split else open_split(split)
        except DataError as error:
            found[split] = error
    return found


def describe_each(text: Encoded, each: Mapping[str, Encoded | DataError]) -> list[str]:
    """One line per split that has files, with tokens and files, and one for unused files.

    If no split has a file, the tokens are those of all files."""
    lines = []
    undivided = text.split is None and not any(text.splits.get(split) for split in SPLITS)
    for split, files in text.splits.items():
        count, found = f"{len(text):,} tokens in " if undivided else "", each.get(split)
        if isinstance(found, DataError):
            files = files_of(text, split, found)
            count = "no text in " if isinstance(found, EmptySplitError) else f"cannot be encoded, because {found}: "
        elif found is not None:
            count = f"{len(found):,} tokens in "
        lines += [_describe(split, count, files)] if files else []
    return lines


def files_of(text: Encoded, split: str, error: DataError) -> tuple[str, ...]:
    """The files of a split that cannot be encoded. A split that nothing is named after has none."""
    return error.files if isinstance(error, EmptySplitError) else text.splits.get(split, ())


def describe_all(text: Encoded, open_split: Callable[[str], Encoded]) -> list[str]:
    """The lines of `describe_each`."""
    return describe_each(text, open_each(text, open_split))


def open_any_split(open_split: Callable[[str | None], Encoded]) -> Encoded:
    """The train split or, of a text with nothing to train on, another split or all of it."""
    for split in SPLITS:
        with contextlib.suppress(EmptySplitError):
            return open_split(split)
    return open_split(None)


def _describe(split: str, count: str, files: Sequence[str]) -> str:
    return f"{split}: {count}{_join_names(files)}"


def open_corpus(
    name_or_path: str | Path,
    split: str | None = None,
    tokenizer: Tokenizer | TokenizerSpec | str | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    held_out: Mapping[str, str | Path] | None = None,
    field: str | None = None,
    encoding: str | None = None,
    progress: Progress | None = None,
) -> Encoded:
    """Encode a known corpus, a file, an archive or a folder: all of it, or its train, valid or test split.

    In a folder, files and top-level folders named train, test, and valid, val, dev or validation are that split.
    `held_out` gives other files or folders for valid or test. They are not part of the text without a split.

    `tokenizer` is a tokenizer, a TokenizerSpec, the name of one ("bytes", "characters", "words", ...) or the path of a
    tokenizer.json. Default: that of the corpus, and bytes for files and folders. A spec builds its vocabulary from the
    training split. If a spec is given and no split, it builds it from all of the text.

    `field` is the key of the text in JSON lines and the column in tables (default "text"). `encoding` is that of the
    files, if it is not UTF-8. `progress` is called with the bytes counted and encoded so far and in all.
    """
    root = cache_folder(cache)
    given = {name: str(path) for name, path in (held_out or {}).items() if split is not None}
    source = find_source(name_or_path, root, given, TextFormat(field, encoding))
    paths = [document.path for document in source.documents]
    before = [signature(path) for path in paths]
    contents = digests(paths, root)
    spec = tokenizer if tokenizer is not None else source.tokenizer
    if isinstance(spec, str):
        spec = find_tokenizer(spec)
    pieces = split_pieces(source.name, source.documents, source.split, split, spec.unit)
    stages = _Stages(progress, sum(piece.size for piece in pieces))
    if isinstance(spec, TokenizerSpec):
        identity: Any = dataclasses.asdict(spec)
        vocabulary_splits = spec.vocabulary_splits if split or tokenizer is None else (None,)
        chosen = _build_tokenizer(source, spec, vocabulary_splits, contents, root, stages.counting)
    else:
        identity, chosen = spec.fingerprint, spec
    ranges = _byte_ranges(source, pieces)
    names = [document.name for document in source.documents]
    family = key(str(source.root), source.name, split, identity, field, encoding, *given.items())
    target = (
        root / "encoded" / f"{family}-{key(FORMAT, documents.TASK_BYTES, names, contents, ranges, chosen.fingerprint)}"
    )
    found = _load(target, source.name, split, chosen)
    while found is None:
        with resumable_folder(target) as folder:
            if folder is not None:
                _write(folder, pieces, chosen, workers, stages.encoding)
                if [signature(path) for path in paths] != before:
                    raise DataError(f"{source.name} changed while it was read; try again when no process writes to it")
        for stale in target.parent.glob(f"{family}-*"):
            if stale != target:
                remove_folder(stale)
        found = _load(target, source.name, split, chosen, written=folder is not None)
        if found is None and target.exists():
            remove_folder(target)
    if not len(found):
        raise DataError(f"{source.name} has no tokens with this tokenizer; add text or choose another tokenizer")
    if isinstance(source.split, ByName):
        warn_about_json_lines(source.documents)
    _warn_about_lost_text(source.name, pieces, chosen)
    _warn_about_unknown(found)
    return dataclasses.replace(found, splits=describe_splits(source.documents, source.split, spec.unit))


def _warn_about_lost_text(name: str, pieces: Sequence[Piece], tokenizer: Tokenizer) -> None:
    """Warn if the beginning of a text, whitespace apart, is not in its subwords. Scores per byte are then too low."""
    if tokenizer.unit != "subword":
        return
    chunks = next(tasks(pieces, tokenizer.unit, _SAMPLE_BYTES))
    texts = [text for chunk in chunks for text in documents.read_documents(chunk)]
    decoded = [tokenizer.decode_bytes(tokenizer.encode(text)) for text in texts]
    if [b"".join(text.split()) for text in decoded] != [b"".join(text.split()) for text in texts]:
        message = (
            f"the tokenizer changes or drops characters of {name}, so scores per byte and per word are too low to "
            "compare with others; use a tokenizer of bytes or with a byte fallback"
        )
        warnings.warn(message, DataWarning, stacklevel=3)


def _warn_about_unknown(text: Encoded) -> None:
    """Warn if most tokens are unknown. A large text is sampled in blocks: single tokens would read most pages of it."""
    if text.tokenizer.unknown is None:
        return
    firsts = range(0, len(text), max(_BLOCK_TOKENS, len(text) // _BLOCKS))
    sample = np.concatenate([text.ids[first : first + _BLOCK_TOKENS] for first in firsts])
    share = np.count_nonzero(sample == text.tokenizer.unknown) / len(sample)
    if share > 0.5:
        part = f"the {text.split} split of {text.name}" if text.split else text.name
        warnings.warn(
            f"{share:.0%} of the tokens of {part} are not in the vocabulary of the tokenizer, so scores are "
            "not meaningful; use a tokenizer trained on similar text, or the tokenizer 'bytes'",
            DataWarning,
            stacklevel=3,
        )


class _Stages:
    """One progress for counting words, if that is needed, and encoding."""

    def __init__(self, progress: Progress | None, size: int) -> None:
        self.progress, self.size, self.counted = progress, size, 0

    def counting(self, done: int, total: int) -> None:
        self.counted = total
        if self.progress is not None:
            self.progress(done, total + self.size)

    def encoding(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(self.counted + done, self.counted + total)


def _join_names(names: Sequence[str], most: int = 5) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _byte_ranges(source: Source, pieces: Sequence[Piece]) -> list[tuple[int, int, int, str | None]]:
    """Pieces as plain values: the index of the document in its corpus, the piece's first and last byte, the field."""
    index_of = {document.path: k for k, document in enumerate(source.documents)}
    return [(index_of[piece.path], piece.start, piece.stop, piece.field) for piece in pieces]


def _build_tokenizer(
    source: Source,
    spec: TokenizerSpec,
    splits: Sequence[str | None],
    contents: Sequence[str],
    root: Path,
    progress: Progress | None,
) -> Tokenizer:
    """The tokenizer of a spec, built from some splits of a corpus. It is cached, because building it reads the text."""
    if spec.kind == "bytes":
        return spec.build([])
    if spec.vocabulary_file is not None and (listed := source.root / spec.vocabulary_file).is_file():
        return WordTokenizer.from_vocabulary(listed, spec.lower, spec.boundary)
    parts = [split_pieces(source.name, source.documents, source.split, part, spec.unit) for part in splits]
    pieces = [piece for part in parts for piece in part]
    path = root / "tokenizers" / f"{key(dataclasses.asdict(spec), contents, _byte_ranges(source, pieces))}.json"
    found = _cached_tokenizer(path)
    if found is None:
        with scratch_folder(path) as folder:
            found = _cached_tokenizer(path)  # another process may have built it meanwhile
            if found is None:
                found = spec.build(pieces, folder=folder, progress=progress)
                write_json(path, {"fingerprint": found.fingerprint, "tokenizer": found.to_dict()})
    return found


def _cached_tokenizer(path: Path) -> Tokenizer | None:
    cached = read_json(path)
    try:
        found = tokenizer_from_dict(cached["tokenizer"])
        return found if found.fingerprint == cached["fingerprint"] else None
    except (CheckpointError, LookupError, TypeError):
        return None


def _write(
    folder: Path, pieces: Sequence[Piece], tokenizer: Tokenizer, workers: int | None, progress: Progress | None
) -> None:
    """Encode pieces and write the files of the encoded text. Continues where a killed process stopped."""
    total = sum(piece.size for piece in pieces)
    with Writer(folder, tokenizer) as out:
        todo = islice(tasks(pieces, tokenizer.unit), out.done.tasks, None)
        found = _encode_tasks(pieces, todo, tokenizer, workers)
        for task, result in found:
            out.add(result, sum(chunk.size for chunk in task))
            if progress is not None:
                progress(out.done.read, total)
        out.finish()


def _encode_tasks(
    pieces: Sequence[Piece], todo: Iterator[Task], tokenizer: Tokenizer, workers: int | None
) -> Iterator[tuple[Task, EncodedTask]]:
    """The result of every task, in order, from `workers` processes. Default: as many as are useful."""
    if workers is not None:
        return run_tasks(encoder(tokenizer), todo, workers)
    if tokenizer.unit == "subword":
        workers, threads = subword_workers(pieces, tokenizer.size)
        if workers > 1:
            return run_tasks(encoder(tokenizer), todo, workers, threads)
        return run_in_threads(partial(encode_task, tokenizer), todo)  # the library uses several cores by itself
    if tokenizer.unit == "byte":
        workers = byte_workers(pieces)
        if workers > 1:
            return run_tasks(encoder(tokenizer), todo, workers)
        return run_in_threads(partial(encode_task, tokenizer), todo)
    return run_tasks(encoder(tokenizer), todo, useful_workers(pieces, tokenizer.size))


def _load(folder: Path, name: str, split: str | None, tokenizer: Tokenizer, written: bool = False) -> Encoded | None:
    """The encoded text in `folder`; None if it is missing or its hash does not match. `written`: just by this process.

    Hashing takes 0.07 s for 100 MB on a CPU with SHA instructions, 0.2 s on others.
    """
    about = read_json(folder / ABOUT)
    try:
        tokens, fingerprint, size, words = (about[name] for name in ("tokens", "fingerprint", "bytes", "words"))
        dtype = tokenizer.dtype.newbyteorder("<")
        if about.pop("check") != key(about) or (folder / IDS).stat().st_size != tokens * dtype.itemsize:
            return None
        starts = np.load(folder / STARTS, allow_pickle=False)
        if starts.dtype != np.dtype("<i8") or starts.ndim != 1:
            return None
        if not written and _fingerprint(folder / IDS, starts, tokenizer) != fingerprint:
            return None
        ids: Ids = np.memmap(folder / IDS, dtype, "r") if tokens else np.empty(0, dtype)
    except (OSError, ValueError, TypeError, LookupError, EOFError, DataError):
        return None
    return Encoded(name, split, ids, starts, tokenizer, fingerprint, size, words)


def _fingerprint(ids: Path, starts: NDArray[np.int64], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(tokenizer.fingerprint.encode("ascii"))
    for block in read_blocks(ids):
        digest.update(block)
    digest.update(starts.tobytes())
    return digest.hexdigest()
