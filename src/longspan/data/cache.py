"""The cache folder: what is in it appeared whole, and files are hashed again only when they may have changed."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.tokens.text import read_blocks

_STALE_SECONDS = 24 * 3600.0
# A file written within this time of being hashed could be written again without its times moving (git's "racy" files).
_RACY_NANOSECONDS = 2_000_000_000


def cache_folder(cache: Path | None = None) -> Path:
    """Where downloads, unpacked archives and encoded texts live: LONGSPAN_CACHE, or ~/.cache/longspan."""
    try:
        folder = cache or Path(os.environ.get("LONGSPAN_CACHE") or Path.home() / ".cache" / "longspan")
    except RuntimeError:  # HOME is not set, and the user is not in the password database
        raise DataError("no home folder was found for the cache; set LONGSPAN_CACHE to a folder") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made: {error.strerror}; set LONGSPAN_CACHE to another place"
        ) from None
    return folder.resolve()


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that appears at `target` whole or not at all.

    Where another process was quicker, its folder stays and ours goes: both were made from the same thing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    aside = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        yield aside
        sync(aside)
        try:
            aside.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync(target.parent)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """A folder is gone at once for others, however long the deleting takes."""
    aside = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    with contextlib.suppress(OSError):
        folder.rename(aside / "old")
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what processes that were killed left half-made, once it is a day old."""
    for left in folder.glob(".part-*"):
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (left, *left.iterdir()))
            if time.time() - newest > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """A file or a folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, values: Any) -> None:
    content = json.dumps(values).encode("ascii")
    write_whole(path, lambda file: file.write(content))


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """A file that `write` fills: under its name whole or not at all, and on the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(prefix=".part-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            Path(aside).replace(path)
        finally:
            Path(aside).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None


def read_json(path: Path) -> Any:
    """What a JSON file of the cache holds; None where it is missing or damaged, and so must be made again."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for block in read_blocks(path):
        digest.update(block)
    return digest.hexdigest()


def key(*values: Any) -> str:
    """A name for plain values: equal values, equal name."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("ascii")).hexdigest()[:32]


def signature(path: Path) -> list[int]:
    """What changes when a file is written to, without reading it: size, times and inode."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def digests(files: Sequence[Path], cache: Path) -> list[str]:
    """The SHA-256 of each file; a file whose size, times and inode have not moved is not read again."""
    memo = cache / "digests" / f"{key([str(path) for path in files])}.json"
    known = read_json(memo)
    known = known if isinstance(known, dict) else {}
    found: dict[str, list[Any]] = {}
    for path in files:
        now, signed = time.time_ns(), signature(path)
        before = known.get(str(path))
        if isinstance(before, list) and before[:-1] == signed:
            found[str(path)] = before
        else:
            digest = sha256(path)
            settled = now - max(signed[1], signed[2]) > _RACY_NANOSECONDS
            found[str(path)] = [*(signed if settled else []), digest]
    if found != known:
        write_json(memo, found)
    return [str(found[str(path)][-1]) for path in files]
