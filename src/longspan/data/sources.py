"""What a name or a path stands for: documents in order, a way to split them, a way to read them."""

import dataclasses
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.data.archives import kind_of, unpack
from longspan.data.cache import digests, new_folder, read_json, remove_folder, sha256, write_json
from longspan.data.corpora import CORPORA, Corpus
from longspan.data.splits import HELD_OUT, ByName, Document, SplitRule, named_split
from longspan.errors import DataError, UnknownNameError

# Tests are not the library, differ between installations, and hold files that are no valid Python on purpose.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """A corpus that is here; `root` is where its files lie."""

    name: str
    root: Path
    documents: tuple[Document, ...]
    split: SplitRule
    reading: str = "bytes"


def find_source(name_or_path: str | Path, cache: Path, held_out: Mapping[str, str] | None = None) -> Source:
    """A known corpus by its name, or any file, archive or folder; a known name wins over a file of that name.

    `held_out` gives the files or folders of the valid and the test split, in place of those the corpus has.
    """
    name, held_out = str(name_or_path), held_out or {}
    for split in held_out:
        if split not in HELD_OUT:
            raise UnknownNameError("held-out split", split, HELD_OUT)
    if isinstance(name_or_path, str) and name in CORPORA:
        for split in held_out:
            raise DataError(f"{name} has a {split} split of its own; leave data.{split} out")
        return _known(CORPORA[name], cache)
    if not name:
        raise DataError("the name of the data is empty; give a corpus, a file or a folder")
    path = Path(name_or_path)
    if not path.exists() and os.sep not in name and not path.suffix:
        raise UnknownNameError("corpus, file or folder", name, CORPORA)
    documents = _labelled(_documents(path, cache), path)
    documents = _replaced(documents, held_out, cache)
    full = tuple(document for document in documents if document.size or document.split)
    return Source(name, path.resolve(), full, ByName())


def _known(corpus: Corpus, cache: Path) -> Source:
    if corpus.built_in:
        root, documents = _standard_library()
    else:
        root = corpus.folder(cache)
        if not root.is_dir():
            way = "longspan data get " + corpus.name + ("" if corpus.url else " --from FILE")
            raise DataError(
                f"{corpus.name} is not here yet; run `{way}` (or, for a file of that name, write ./{corpus.name})"
            )
        names = [file.name for file in corpus.files] or sorted(path.name for path in root.iterdir())
        documents = tuple(_document(name, root / name) for name in names)
    return Source(corpus.name, root, documents, corpus.split, corpus.reading)


def _standard_library() -> tuple[Path, tuple[Document, ...]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name in _walk(root, _NOT_LIBRARY) if name.endswith(".py")]
    if not names:
        raise DataError(f"the source of the standard library is not in {root}; hand over a file or folder as data")
    return root, tuple(_document(name, root / name) for name in names)


def _documents(path: Path, cache: Path) -> list[Document]:
    """Each file below a folder, in the order of the names, or the one file; an archive stands for what is in it."""
    if path.is_dir():
        return [document for inner in _walk(path) for document in _expanded(inner, path / inner, cache)]
    if path.is_file():
        return _expanded(path.name, path, cache)
    if path.exists():
        raise DataError(f"{path} is neither a file nor a folder but a device or a pipe; write it to a file first")
    raise DataError(f"there is no file or folder {path}")


def _labelled(documents: Sequence[Document], path: Path) -> list[Document]:
    """Documents with the split that their file or top-level folder is named for, in a folder or an archive.

    The name of a file that is the whole corpus does not count, nor does that of a folder around everything.
    """
    if path.is_file() and kind_of(path) not in ("tar", "zip"):
        return list(documents)
    around = f"{path.name}/" if path.is_file() else ""
    names = [document.name.removeprefix(around) for document in documents]
    while len(tops := {name.partition("/")[0] for name in names}) == 1 and "/" in names[0]:
        if named_split(tops.pop()):
            break
        names = [name.partition("/")[2] for name in names]
    splits = [named_split(name.partition("/")[0]) for name in names]
    return [dataclasses.replace(document, split=split) for document, split in zip(documents, splits, strict=True)]


def _replaced(documents: Sequence[Document], held_out: Mapping[str, str], cache: Path) -> list[Document]:
    """Documents with the files that were given for a split in place of those named for it; these are in no split."""
    found = [dataclasses.replace(d, split="unused") if d.split in held_out else d for d in documents]
    for split, given in held_out.items():
        path = Path(given)
        chosen = {document.path: document for document in _documents(path, cache)}
        for document in found:
            if document.path in chosen and document.split in HELD_OUT:
                raise DataError(f"{document.name} is {document.split} text already; give data.{split} another file")
        root = path if path.is_dir() else path.parent
        found = [document for document in found if document.path not in chosen]
        found += [dataclasses.replace(d, name=str(root / d.name), split=split) for d in chosen.values()]
    return found


def _expanded(name: str, path: Path, cache: Path) -> list[Document]:
    if kind_of(path) is None:
        return [_document(name, path.resolve())]
    unpacked = _unpacked(path.resolve(), cache)
    return [_document(f"{name}/{inner}", unpacked / inner) for inner in _walk(unpacked)]


def _unpacked(path: Path, cache: Path) -> Path:
    """What an archive holds, unpacked once, and again where one of its files was changed or left empty by a crash."""
    folder = cache / "unpacked" / f"{digests([path], cache)[0][:32]}-{path.name[:100]}"
    content = folder / "content"
    noted = read_json(folder / "digests.json")
    if noted is not None:
        names = _walk(content)
        if noted == dict(zip(names, digests([content / name for name in names], cache), strict=True)):
            return content
    if folder.exists():
        remove_folder(folder)
    with new_folder(folder) as aside:
        (aside / "content").mkdir()
        unpack(path, aside / "content")
        names = _walk(aside / "content")
        write_json(aside / "digests.json", {name: sha256(aside / "content" / name) for name in names})
    return content


def _walk(root: Path, without: frozenset[str] = frozenset()) -> list[str]:
    """The files below a folder, hidden ones left out, by their names from it, sorted."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}; allow it, or take it out of {root}")

    found = []
    try:
        for folder, inner, files in os.walk(root, onerror=refuse):
            inner[:] = [name for name in inner if name not in without and not name.startswith(".")]
            paths = (Path(folder, name) for name in files if not name.startswith("."))
            found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    except OSError as error:  # a folder that can be listed but not entered
        refuse(error)
    return sorted(found)


def _document(name: str, path: Path) -> Document:
    try:
        return Document(name, path, path.stat().st_size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
