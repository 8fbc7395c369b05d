"""Resolve a corpus name or a path to its documents, split rule and tokenizer."""

import dataclasses
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from longspan.data.archives import archive_kind, default_limit, unpack
from longspan.data.cache import (
    atomic_folder,
    cache_folder,
    digests,
    key,
    not_written,
    read_json,
    remove_folder,
    sha256,
    write_json,
)
from longspan.data.convert import find_encoding, transcode
from longspan.data.corpora import CORPORA, Corpus
from longspan.data.json_lines import json_lines_field
from longspan.data.splits import HELD_OUT, SPLITS, ByName, Document, SplitRule, named_split, split_of_path
from longspan.data.tables import FIELD, TABLES, write_table
from longspan.data.tokenizer_specs import find_tokenizer_spec
from longspan.errors import DataError, UnknownNameError, not_read

# Tests differ between installations, and some of their files are invalid Python on purpose.
_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_STANDARD_INPUT = "standard-input"  # the folder of the cache for it
_MAX_NESTED = 4  # an archive can contain itself
# How compressed files and tables begin.
_MARKS = {
    b"\x1f\x8b": ".txt.gz",
    b"BZh": ".txt.bz2",
    b"\xfd7zXZ\0": ".txt.xz",
    b"\x28\xb5\x2f\xfd": ".txt.zst",
    b"PAR1": ".parquet",
}


@dataclass(frozen=True)
class TextFormat:
    """How files are read: the key or column of the text in JSON lines and tables, and the encoding (default UTF-8)."""

    field: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.encoding is not None:
            find_encoding(self.encoding)
        if self.field == "":
            raise DataError("the name of the field is empty; use the key or column that has the text")


@dataclass(frozen=True)
class Source:
    """A corpus on this machine; `root` is the folder or file it is read from."""

    name: str
    root: Path
    documents: tuple[Document, ...]
    split: SplitRule
    tokenizer: str = "bytes"


def read_standard_input(cache: Path | None = None) -> Path:
    """Copy standard input to a file in the cache. Equal texts have equal names, with the suffix of their format."""
    # Each process of torchrun would read a part of it.
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise DataError("standard input cannot be read by several processes; write it to a file and use that as data")
    folder = cache_folder(cache) / _STANDARD_INPUT
    try:
        return _copy_standard_input(folder)
    except OSError as error:
        raise not_written(folder, error) from None


def _copy_standard_input(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".part-", dir=folder) as file:
        while block := sys.stdin.buffer.read(1 << 20):
            file.write(block)
        file.flush()
        found = Path(file.name)
        if not found.stat().st_size:
            raise DataError("standard input is empty; pipe a text to it")
        with found.open("rb") as written:
            head = written.read(8)
        suffix = next((suffix for mark, suffix in _MARKS.items() if head.startswith(mark)), ".txt")
        path = folder / f"{sha256(found)[:32]}{suffix}"
        if not path.exists():
            os.link(file.name, path)
    return path


def find_source(
    name_or_path: str | Path,
    cache: Path,
    held_out: Mapping[str, str] | None = None,
    form: TextFormat | None = None,
) -> Source:
    """The known corpus of that name, or else a file, an archive or a folder.

    `held_out` gives files or folders for the valid and test splits, instead of those of the corpus.
    """
    form = form or TextFormat()
    name, held_out = str(name_or_path), held_out or {}
    for split in held_out:
        if split not in HELD_OUT:
            raise UnknownNameError("held-out split", split, HELD_OUT)
    if isinstance(name_or_path, str) and name in CORPORA:
        for split in held_out:
            raise DataError(f"{name} already has a {split} split; leave out data.{split}")
        for option, value in dataclasses.asdict(form).items():
            if value is not None:
                raise DataError(f"{name} is a known corpus, so {option}={value!r} has no effect; leave out --{option}")
        return _known_source(CORPORA[name], cache)
    if not name:
        raise DataError("the name of the data is empty; use a corpus, a file or a folder")
    path = Path(name_or_path)
    if not path.exists() and os.sep not in name and not path.suffix:
        raise UnknownNameError("corpus, file or folder", name, CORPORA)
    piped = path.parent == cache / _STANDARD_INPUT
    name = "standard input" if piped else name
    documents = _assign_splits(_find_documents(path, cache, form, name if piped else None), path)
    if piped:
        documents = [dataclasses.replace(d, name=d.name.replace(path.name, name, 1)) for d in documents]
    if form.field is not None and any(d.size for d in documents) and not any(d.field for d in documents):
        raise DataError(
            f"{name} contains neither JSON lines nor tables, so the field {form.field!r} has no effect; leave "
            "it out for plain text, or write one JSON object per line"
        )
    documents = _replace_held_out(documents, held_out, cache, form)
    kept = tuple(document for document in documents if document.size or document.split)
    return Source(name, path.resolve(), kept, ByName())


def _known_source(corpus: Corpus, cache: Path) -> Source:
    if corpus.built_in:
        root, documents = _standard_library()
    elif corpus.parts:
        root, documents = cache / "corpora", _documents_of_parts(corpus, cache)
    else:
        root = corpus.folder(cache)
        if not root.is_dir():
            command = "longspan data get " + corpus.name + ("" if corpus.url else " --from FILE")
            raise DataError(
                f"{corpus.name} is not installed; run `{command}` (or, for a file of that name, write ./{corpus.name})"
            )
        vocabulary = find_tokenizer_spec(corpus.tokenizer).vocabulary_file
        listed = sorted(path.name for path in root.iterdir() if path.name != vocabulary)
        names = [file.name for file in corpus.files] or listed
        documents = tuple(_document(name, root / name) for name in names)
    return Source(corpus.name, root, documents, corpus.split, corpus.tokenizer)


def _documents_of_parts(corpus: Corpus, cache: Path) -> tuple[Document, ...]:
    """The documents of all parts, each with its split. Those of all parts but the first are train or unused."""
    found = []
    for name in corpus.parts:
        source = _known_source(CORPORA[name], cache)
        wanted = SPLITS if name == corpus.parts[0] else ("train",)
        split_of = {p.path: split for split in wanted for p in source.split.pieces(source.documents, split, "byte")}
        found += [
            dataclasses.replace(d, name=f"{name}/{d.name}", split=split_of.get(d.path, "unused"))
            for d in source.documents
        ]
    return tuple(found)


def _standard_library() -> tuple[Path, tuple[Document, ...]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name in _list_files(root, _EXCLUDED) if name.endswith(".py")]
    if not names:
        raise DataError(f"the source of the standard library is not in {root}; use a file or folder as data")
    return root, tuple(_document(name, root / name) for name in names)


def _find_documents(path: Path, cache: Path, form: TextFormat, shown: str | None = None) -> list[Document]:
    """All files below a folder, sorted by name, or a single file. Archives are replaced by their files.

    Errors call the file `shown` (default: its path).
    """
    if path.is_dir():
        names = _without_metadata(path, _list_files(path), str(path))
        return [document for inner in names for document in _expand(inner, path / inner, cache, form)]
    if path.is_file():
        return _expand(path.name, path, cache, form, shown)
    if path.exists():
        raise DataError(f"{path} is a device or a pipe; write it to a file first")
    raise DataError(f"there is no file or folder {path}; check the name")


def _assign_splits(documents: Sequence[Document], path: Path) -> list[Document]:
    """Give each document of a folder or an archive the split that its file or top-level folder is named after. Shards
    of a split may be in any folder.

    The name of a single file is ignored, and so is that of a folder that contains everything else.
    """
    if path.is_file() and archive_kind(path) not in ("tar", "zip"):
        return list(documents)
    prefix = f"{path.name}/" if path.is_file() else ""
    names = [document.name.removeprefix(prefix) for document in documents]
    while len(tops := {name.partition("/")[0] for name in names}) == 1 and "/" in names[0]:
        if named_split(tops.pop()):
            break
        names = [name.partition("/")[2] for name in names]
    return [dataclasses.replace(d, split=split_of_path(name)) for d, name in zip(documents, names, strict=True)]


def _replace_held_out(
    documents: Sequence[Document], held_out: Mapping[str, str], cache: Path, form: TextFormat
) -> list[Document]:
    """Use the given files for a split. Documents that were named after that split become unused."""
    found = [dataclasses.replace(d, split="unused") if d.split in held_out else d for d in documents]
    for split, given in held_out.items():
        path = Path(given)
        chosen = {document.path: document for document in _find_documents(path, cache, form)}
        for document in found:
            if document.path in chosen and document.split in HELD_OUT:
                raise DataError(
                    f"{document.name} is already in the {document.split} split; use another file for data.{split}"
                )
        root = path if path.is_dir() else path.parent
        found = [document for document in found if document.path not in chosen]
        found += [dataclasses.replace(d, name=str(root / d.name), split=split) for d in chosen.values()]
    return found


def _without_metadata(root: Path, names: Sequence[str], shown: str) -> list[str]:
    """The files with text: of a data set saved by `datasets`, the tables that its state.json lists."""
    paths = [PurePosixPath(name) for name in names]
    known = set(paths)
    folders = [p.parent for p in paths if p.name == "state.json" and p.with_name("dataset_info.json") in known]
    tables = {folder: _listed_tables(root / folder, str(PurePosixPath(shown) / folder)) for folder in folders}
    above = {folder.parent / "dataset_dict.json" for folder in tables}
    kept = [p for p in paths if p not in above and (p.parent not in tables or p.name in tables[p.parent])]
    return [str(path) for path in kept]


def _listed_tables(folder: Path, shown: str) -> set[str]:
    """The tables that the state.json of a saved data set lists."""
    state = read_json(folder / "state.json")
    listed = state.get("_data_files") if isinstance(state, dict) else None
    entries = listed if isinstance(listed, list) else []
    names = {str(entry["filename"]) for entry in entries if isinstance(entry, dict) and "filename" in entry}
    if not names:
        raise DataError(f"the state.json in {shown} lists no tables; it is damaged, so save the data set again")
    for name in sorted(names):
        if not (folder / name).is_file():
            raise DataError(f"{shown} has no {name[:80]}, which its state.json lists; save the data set again")
    return names


def _expand(name: str, path: Path, cache: Path, form: TextFormat, shown: str | None = None) -> list[Document]:
    """The document of a file, or the documents of an archive."""
    files = _unpacked("", path.absolute(), cache, shown or str(path))
    return [_read_as(name + inner, file, cache, form, (shown or str(path)) + inner) for inner, file in files]


def _unpacked(
    inner: str, path: Path, cache: Path, shown: str, left: int | None = None, depth: int = 0
) -> list[tuple[str, Path]]:
    """A file, or the files of an archive, which is read like a folder: archives and compressed files in it too.

    Every file has its name in the archive `shown`, which begins with `inner`, and its path in the cache. All files
    together have at most `left` bytes (default: the limit of `unpack`).
    """
    if archive_kind(path) is None:
        return [(inner, path)]
    if depth > _MAX_NESTED:
        raise DataError(f"{shown}{inner} is nested in {depth} other archives; unpack them yourself and use the folder")
    left = default_limit(path) if left is None else max(left, 0)
    target = cache / "unpacked" / f"{digests([path], cache)[0][:32]}-{path.name[:100]}"
    folder = _cached_folder(target, cache, partial(unpack, path, limit=left, shown=shown + inner))
    found = []
    for below in _without_metadata(folder, _list_files(folder), shown + inner):
        files = _unpacked(f"{inner}/{below}", folder / below, cache, shown, left, depth + 1)
        left -= sum(file.stat().st_size for _, file in files)
        found += files
    return found


def _read_as(name: str, path: Path, cache: Path, form: TextFormat, shown: str) -> Document:
    """The document of a file, which errors call `shown`. Tables and other encodings are converted in the cache.

    Its name says what it is, not that of the file it links to: the cache of `huggingface_hub` has links to files named
    after their hashes.
    """
    if path.suffix.lower() in TABLES:
        write = partial(write_table, path, form.field or FIELD, form.encoding, shown)
        path = _convert(path, cache, FIELD + ".jsonl", write, form.field, form.encoding)
        return dataclasses.replace(_document(name, path), field=FIELD, shown=shown)
    if form.encoding is not None:
        path = _convert(path, cache, path.name, partial(transcode, path, form.encoding, shown), form.encoding)
    field = json_lines_field(path, form.field)
    return dataclasses.replace(_document(name, path.resolve()), field=field, shown=shown)


def _convert(path: Path, cache: Path, name: str, write: Callable[[Path], None], *options: str | None) -> Path:
    """The converted file in the cache."""
    identity = key(digests([path], cache)[0], name, *options)
    folder = cache / "converted" / f"{identity}-{path.name[:100]}"
    return _cached_folder(folder, cache, lambda content: write(content / name)) / name


def _cached_folder(folder: Path, cache: Path, fill: Callable[[Path], object]) -> Path:
    """A folder of the cache, filled when it is first used, and again if a file was changed or left empty by a crash."""
    content = folder / "content"
    expected = read_json(folder / "digests.json")
    if expected is not None:
        names = _list_files(content)
        if expected == dict(zip(names, digests([content / name for name in names], cache), strict=True)):
            return content
    if folder.exists():
        remove_folder(folder)
    with atomic_folder(folder) as temporary:
        (temporary / "content").mkdir()
        fill(temporary / "content")
        names = _list_files(temporary / "content")
        write_json(temporary / "digests.json", {name: sha256(temporary / "content" / name) for name in names})
    return content


def _list_files(root: Path, excluded: frozenset[str] = frozenset()) -> list[str]:
    """The relative paths of the files below a folder, sorted. Hidden files and excluded folders are skipped."""

    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}; change its permissions, or remove it from {root}"
        )

    found = []
    seen = {_identity(root)}
    try:
        for folder, inner, files in os.walk(root, onerror=fail, followlinks=True):
            below = sorted(name for name in inner if name not in excluded and not name.startswith("."))
            inner.clear()
            for name in below:
                identity = _identity(Path(folder, name))
                if identity not in seen:  # else a link to a folder that was listed, perhaps to one that contains it
                    seen.add(identity)
                    inner.append(name)
            paths = (Path(folder, name) for name in files if not name.startswith("."))
            found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    except OSError as error:  # a folder that can be listed but not entered
        fail(error)
    return sorted(found)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _document(name: str, path: Path) -> Document:
    try:
        return Document(name, path, path.stat().st_size)
    except OSError as error:
        raise not_read(path, error) from None
