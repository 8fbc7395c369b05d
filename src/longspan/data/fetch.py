"""`longspan data get`: install a known corpus in the cache from its URL or from a file, and verify it."""

import shutil
import tempfile
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

from longspan.data.archives import archive_kind, unpack
from longspan.data.cache import atomic_folder, cache_folder, file_digest, sync
from longspan.data.corpora import Corpus, CorpusFile, find_corpus
from longspan.data.download import Progress, Retry, download
from longspan.errors import DataError, DataWarning, counted

_COMPRESSED_SUFFIXES = ("", ".xz", ".gz", ".bz2", ".zst")


def get(
    name: str,
    source: str | Path | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    retry: Retry | None = None,
) -> Path:
    """The folder of a known corpus, which is fetched first if it is not installed.

    `source` is a URL, a file or a folder to use instead of the public URL. Archives and compressed files are unpacked.
    Files are checked against their known size and SHA-256; if one is wrong, nothing is installed.
    """
    corpus, root = find_corpus(name), cache_folder(cache)
    if corpus.built_in:
        raise DataError(f"{name} is built in, so there is nothing to download; use it by its name")
    if corpus.parts:
        raise DataError(f"{name} consists of other corpora; get {' and '.join(corpus.parts)} instead")
    target = corpus.folder(root)
    if target.is_dir():
        if source is not None:
            warnings.warn(
                f"{name} is already in {target}, so {source} is not used; to install it again, remove that folder",
                DataWarning,
                stacklevel=2,
            )
        return target
    if source is None and corpus.url is None:
        raise DataError(
            f"{name} has no public URL; download its file yourself and install it: longspan data get {name} --from FILE"
        )
    address = str(source if source is not None else corpus.url)
    if not address.startswith(("http://", "https://")):
        _install(corpus, Path(address), target)
        return target
    known = corpus.archive_sha256 if address == corpus.url else None
    path = root / "downloads" / f"{corpus.files_of or corpus.name}-{address.rstrip('/').rpartition('/')[2]}"
    fetched = download(address, path, known, progress, retry, limit=corpus.download_limit)
    try:
        _install(corpus, fetched, target)
    finally:
        fetched.unlink(missing_ok=True)
    return target


def _install(corpus: Corpus, source: Path, target: Path) -> None:
    """Copy and check the files of a corpus. `target` appears complete or not at all."""
    if not source.exists():
        raise DataError(f"there is no file or folder {source}; check the name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as scratch, atomic_folder(target) as folder:
        found = _candidates(corpus, source, Path(scratch))
        wanted = corpus.files or tuple(CorpusFile(path.name) for path in found)
        if not wanted:
            raise DataError(f"{source} contains no file of {corpus.name}; use another source")
        for file in wanted:
            named = [path for path in found if path.name == file.name]
            if not named and len(wanted) == len(found) == 1:
                named = found  # the only file of a corpus may have any name, because its checksum is verified
            if len(named) != 1:
                count = len(named) or "no"
                raise DataError(f"{source} contains {count} files named {file.name}; {corpus.name} needs exactly one")
            shutil.copyfile(named[0], folder / file.name)
            _check(corpus, file, folder / file.name, source)
        _check_totals(corpus, folder, source)


def _candidates(corpus: Corpus, source: Path, scratch: Path) -> list[Path]:
    """The unpacked files of the source that may belong to the corpus."""
    names = {file.name for file in corpus.files}
    if source.is_dir():
        listed = sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith("."))
        packed = {name + suffix for name in names for suffix in _COMPRESSED_SUFFIXES}
        chosen = [path for path in listed if not names or path.name in packed]
    else:
        chosen = [source]
    found: list[Path] = []
    for k, path in enumerate(chosen):
        kind = archive_kind(path)
        if kind is None:
            found.append(path)
            continue
        inner = scratch / str(k)
        inner.mkdir()
        found += unpack(path, inner, limit=corpus.bytes, only=names if names and kind != "stream" else None)
    return [path for path in found if any(fnmatchcase(path.name, pattern) for pattern in corpus.patterns)]


def _check(corpus: Corpus, file: CorpusFile, path: Path, source: Path) -> None:
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise DataError(
            f"{file.name} of {source} has {size:,} bytes, not the {file.size:,} of {corpus.name}; use another source"
        )
    for name, algorithm, known in (("SHA-256", "sha256", file.sha256), ("SHA-1", "sha1", file.sha1)):
        if known is not None and (found := file_digest(path, algorithm)) != known:
            raise DataError(f"{file.name} of {source} has {name} {found}, not {known}; use another source")
    sync(path)


def _check_totals(corpus: Corpus, folder: Path, source: Path) -> None:
    pattern, all_files = corpus.complete or ("", 0)
    count = sum(fnmatchcase(path.name, pattern) for path in folder.iterdir())
    if count not in (0, all_files):
        raise DataError(
            f"{source} contains {count} of the {all_files} files {pattern} of {corpus.name}; use a complete source"
        )
    sizes = [path.stat().st_size for path in folder.iterdir()]
    if corpus.documents not in (None, len(sizes)):
        raise DataError(
            f"{source} contains {counted(len(sizes), 'file')}, not the {corpus.documents} of {corpus.name}; "
            "use another source"
        )
    if corpus.size not in (None, sum(sizes)):
        raise DataError(
            f"{source} contains {sum(sizes):,} bytes, not the {corpus.size:,} of {corpus.name}; use another source"
        )
