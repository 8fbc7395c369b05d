"""Resolve a corpus name or a path to its documents, split rule and tokenizer."""

import dataclasses
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.data.archives import archive_kind, unpack
from longspan.data.cache import atomic_folder, digests, read_json, remove_folder, sha256, write_json
from longspan.data.corpora import CORPORA, Corpus
from longspan.data.splits import HELD_OUT, ByName, Document, SplitRule, named_split
from longspan.errors import DataError, UnknownNameError

# Tests differ between installations, and some of their files are invalid Python on purpose.
_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """A corpus on this machine; `root` is the folder or file it is read from."""

    name: str
    root: Path
    documents: tuple[Document, ...]
    split: SplitRule
    tokenizer: str = "bytes"


def find_source(name_or_path: str | Path, cache: Path, held_out: Mapping[str, str] | None = None) -> Source:
    """The known corpus of that name, or else a file, an archive or a folder.

    `held_out` gives files or folders for the valid and test splits, instead of those of the corpus.
    """
    name, held_out = str(name_or_path), held_out or {}
    for split in held_out:
        if split not in HELD_OUT:
            raise UnknownNameError("held-out split", split, HELD_OUT)
    if isinstance(name_or_path, str) and name in CORPORA:
        for split in held_out:
            raise DataError(f"{name} has its own {split} split; remove data.{split}")
        return _known_source(CORPORA[name], cache)
    if not name:
        raise DataError("the name of the data is empty; give a corpus, a file or a folder")
    path = Path(name_or_path)
    if not path.exists() and os.sep not in name and not path.suffix:
        raise UnknownNameError("corpus, file or folder", name, CORPORA)
    documents = _assign_splits(_find_documents(path, cache), path)
    documents = _replace_held_out(documents, held_out, cache)
    kept = tuple(document for document in documents if document.size or document.split)
    return Source(name, path.resolve(), kept, ByName())


def _known_source(corpus: Corpus, cache: Path) -> Source:
    if corpus.built_in:
        root, documents = _standard_library()
    else:
        root = corpus.folder(cache)
        if not root.is_dir():
            command = "longspan data get " + corpus.name + ("" if corpus.url else " --from FILE")
            raise DataError(
                f"{corpus.name} is not installed; run `{command}` (or, for a file of that name, write ./{corpus.name})"
            )
        names = [file.name for file in corpus.files] or sorted(path.name for path in root.iterdir())
        documents = tuple(_document(name, root / name) for name in names)
    return Source(corpus.name, root, documents, corpus.split, corpus.tokenizer)


def _standard_library() -> tuple[Path, tuple[Document, ...]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name in _list_files(root, _EXCLUDED) if name.endswith(".py")]
    if not names:
        raise DataError(f"the source of the standard library is not in {root}; use a file or folder as data")
    return root, tuple(_document(name, root / name) for name in names)


def _find_documents(path: Path, cache: Path) -> list[Document]:
    """All files below a folder, sorted by name, or a single file. Archives are replaced by their files."""
    if path.is_dir():
        return [document for inner in _list_files(path) for document in _expand(inner, path / inner, cache)]
    if path.is_file():
        return _expand(path.name, path, cache)
    if path.exists():
        raise DataError(f"{path} is a device or a pipe; write it to a file first")
    raise DataError(f"there is no file or folder {path}; check the name")


def _assign_splits(documents: Sequence[Document], path: Path) -> list[Document]:
    """Give each document of a folder or an archive the split that its file or top-level folder is named after.

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
    splits = [named_split(name.partition("/")[0]) for name in names]
    return [dataclasses.replace(document, split=split) for document, split in zip(documents, splits, strict=True)]


def _replace_held_out(documents: Sequence[Document], held_out: Mapping[str, str], cache: Path) -> list[Document]:
    """Use the given files for a split. Documents that were named after that split become unused."""
    found = [dataclasses.replace(d, split="unused") if d.split in held_out else d for d in documents]
    for split, given in held_out.items():
        path = Path(given)
        chosen = {document.path: document for document in _find_documents(path, cache)}
        for document in found:
            if document.path in chosen and document.split in HELD_OUT:
                raise DataError(f"{document.name} is already {document.split} text; give data.{split} another file")
        root = path if path.is_dir() else path.parent
        found = [document for document in found if document.path not in chosen]
        found += [dataclasses.replace(d, name=str(root / d.name), split=split) for d in chosen.values()]
    return found


def _expand(name: str, path: Path, cache: Path) -> list[Document]:
    """The document of a file, or the documents of an archive."""
    if archive_kind(path) is None:
        return [_document(name, path.resolve())]
    unpacked = _unpack_cached(path.resolve(), cache)
    return [_document(f"{name}/{inner}", unpacked / inner) for inner in _list_files(unpacked)]


def _unpack_cached(path: Path, cache: Path) -> Path:
    """The folder of an unpacked archive. It is unpacked again if a file was changed, or left empty by a crash."""
    folder = cache / "unpacked" / f"{digests([path], cache)[0][:32]}-{path.name[:100]}"
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
        unpack(path, temporary / "content")
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
    try:
        for folder, inner, files in os.walk(root, onerror=fail):
            inner[:] = [name for name in inner if name not in excluded and not name.startswith(".")]
            paths = (Path(folder, name) for name in files if not name.startswith("."))
            found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    except OSError as error:  # a folder that can be listed but not entered
        fail(error)
    return sorted(found)


def _document(name: str, path: Path) -> Document:
    try:
        return Document(name, path, path.stat().st_size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
