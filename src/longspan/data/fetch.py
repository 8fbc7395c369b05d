"""`longspan data get`: a known corpus, from its public place or from a file, checked and put where it is found."""

import shutil
import tempfile
from pathlib import Path

from longspan.data.archives import kind_of, unpack
from longspan.data.cache import cache_folder, new_folder, sha256, sync
from longspan.data.corpora import Corpus, CorpusFile, find_corpus
from longspan.data.download import Patience, Progress, download
from longspan.errors import DataError

_COMPRESSED = ("", ".xz", ".gz", ".bz2")


def get(
    name: str,
    source: str | Path | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> Path:
    """The folder of a known corpus, fetched if it is not here yet.

    `source` is an address, a file or a folder to take it from in place of its public one; archives and compressed
    files are read as they are. Files are checked against their known size and SHA-256; a wrong one leaves nothing.
    """
    corpus, root = find_corpus(name), cache_folder(cache)
    if corpus.built_in:
        raise DataError(f"{name} needs no fetching; it is made from what is on this machine")
    target = corpus.folder(root)
    if target.is_dir():
        return target
    if source is None and corpus.url is None:
        raise DataError(f"no public place is known for {name}; hand over its file with --from FILE")
    address = str(source if source is not None else corpus.url)
    if not address.startswith(("http://", "https://")):
        _install(corpus, Path(address), target)
        return target
    known = corpus.archive_sha256 if address == corpus.url else None
    place = root / "downloads" / f"{corpus.shares or corpus.name}-{address.rstrip('/').rpartition('/')[2]}"
    fetched = download(address, place, known, progress, patience, limit=corpus.download_limit)
    try:
        _install(corpus, fetched, target)
    finally:
        fetched.unlink(missing_ok=True)
    return target


def _install(corpus: Corpus, source: Path, target: Path) -> None:
    """The checked files of a corpus as the folder `target`, whole or not at all."""
    if not source.exists():
        raise DataError(f"there is no file or folder {source}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as scratch, new_folder(target) as folder:
        found = _gathered(corpus, source, Path(scratch))
        wanted = corpus.files or tuple(CorpusFile(path.name) for path in found)
        for file in wanted:
            named = [path for path in found if path.name == file.name]
            if not named and len(wanted) == len(found) == 1:
                named = found  # the one file of a corpus may come under any name: its checksum decides
            if len(named) != 1:
                count = len(named) or "no"
                raise DataError(f"{source} holds {count} files called {file.name}; {corpus.name} needs one")
            shutil.copyfile(named[0], folder / file.name)
            _check(corpus, file, folder / file.name, source)
        _check_whole(corpus, folder, source)


def _gathered(corpus: Corpus, source: Path, scratch: Path) -> list[Path]:
    """The files that may be those of the corpus, unpacked."""
    names = {file.name for file in corpus.files}
    if source.is_dir():
        listed = sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith("."))
        packed = {name + suffix for name in names for suffix in _COMPRESSED}
        chosen = [path for path in listed if not names or path.name in packed]
    else:
        chosen = [source]
    found: list[Path] = []
    for k, path in enumerate(chosen):
        kind = kind_of(path)
        if kind is None:
            found.append(path)
            continue
        inner = scratch / str(k)
        inner.mkdir()
        found += unpack(path, inner, limit=corpus.bytes, only=names if names and kind != "stream" else None)
    return found


def _check(corpus: Corpus, file: CorpusFile, path: Path, source: Path) -> None:
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise DataError(f"{file.name} of {source} has {size:,} bytes; that of {corpus.name} has {file.size:,}")
    if file.sha256 is not None and (found := sha256(path)) != file.sha256:
        raise DataError(f"{file.name} of {source} has SHA-256 {found}; that of {corpus.name} has {file.sha256}")
    sync(path)


def _check_whole(corpus: Corpus, folder: Path, source: Path) -> None:
    sizes = [path.stat().st_size for path in folder.iterdir()]
    if corpus.documents not in (None, len(sizes)):
        raise DataError(f"{source} holds {len(sizes)} files; {corpus.name} has {corpus.documents}")
    if corpus.size not in (None, sum(sizes)):
        raise DataError(f"{source} holds {sum(sizes):,} bytes; {corpus.name} has {corpus.size:,}")
