"""The cache folder: atomic writes, and file hashes that are computed again only when a file may have changed."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longspan.errors import DataError, not_read
from longspan.tokenizers.text import read_blocks, space_hint

_STALE_SECONDS = 24 * 3600.0
# A file hashed this soon after its last write could change again with the same times (git's "racy" files).
_RACY_NANOSECONDS = 2_000_000_000
_HASH_THREADS = min(8, os.cpu_count() or 1)


def cache_folder(cache: Path | None = None) -> Path:
    """The folder for downloads, unpacked archives and encoded texts: LONGSPAN_CACHE, or ~/.cache/longspan."""
    try:
        folder = cache or Path(os.environ.get("LONGSPAN_CACHE") or Path.home() / ".cache" / "longspan")
    except RuntimeError:  # HOME is not set, and the user is not in the password database
        raise DataError("no home folder was found for the cache; set LONGSPAN_CACHE to a folder") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be created: {error.strerror}; set LONGSPAN_CACHE to another folder"
        ) from None
    return folder.resolve()


def not_written(path: Path, error: OSError) -> DataError:
    """The error of a file of the cache that cannot be written, for example because the disk is full."""
    return DataError(
        f"{path} cannot be written: {error.strerror or error}; {space_hint(error)}set LONGSPAN_CACHE to another folder"
    )


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `target` on success and removed on failure.

    If another process creates `target` first, its folder is kept: both have the same content.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        yield temporary
        sync(temporary)
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync(target.parent)
    except OSError as error:
        raise not_written(target, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def resumable_folder(target: Path) -> Iterator[Path | None]:
    """A folder to fill, renamed to `target` on success, removed after an error and kept if the process is killed.

    It contains what a killed process left. Only one process fills it; the others wait, and get None if `target` exists
    then.
    """
    temporary = target.parent / f".part-{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        with locked(temporary.with_name(f"{temporary.name}.lock")):
            if target.exists():
                yield None
                return
            temporary.mkdir(exist_ok=True)
            try:
                yield temporary
                sync(temporary)
                temporary.rename(target)
                sync(target.parent)
            except Exception:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise not_written(target, error) from None


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """A folder for the work on the file `target`: removed at the end, kept if the process is killed. Other processes
    wait."""
    temporary = target.parent / f".part-{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        with locked(temporary.with_name(f"{temporary.name}.lock")):
            temporary.mkdir(exist_ok=True)
            try:
                yield temporary
            except Exception:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise not_written(temporary, error) from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file. It is removed at the end, so the lock holds only if the file is still there once it is locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_file(descriptor, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`; another process may remove that at any moment."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so other processes never see it half deleted."""
    temporary = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    with contextlib.suppress(OSError):
        folder.rename(temporary / "old")
    shutil.rmtree(temporary, ignore_errors=True)


def remove_stale(folder: Path) -> None:
    """Remove temporary folders of killed processes once they are a day old."""
    for stale in folder.glob(".part-*"):
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (stale, *stale.iterdir()))
            if time.time() - newest > _STALE_SECONDS:
                shutil.rmtree(stale, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, values: Any) -> None:
    content = json.dumps(values).encode("ascii")
    write_atomic(path, lambda file: file.write(content))


def write_atomic(path: Path, write: Callable[[Any], object]) -> None:
    """Create or replace a file with what `write` writes, atomically and flushed to disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".part-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise not_written(path, error) from None


def read_json(path: Path) -> Any:
    """The content of a JSON file of the cache; None if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def sha256(path: Path) -> str:
    return file_digest(path, "sha256")


def file_digest(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for block in read_blocks(path):
        digest.update(block)
    return digest.hexdigest()


def key(*values: Any) -> str:
    """A file name derived from plain values: equal values give equal names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("ascii")).hexdigest()[:32]


def signature(path: Path) -> list[int]:
    """Size, times and inode of a file: they change when it is written to, and need no read."""
    try:
        found = path.stat()
    except OSError as error:
        raise not_read(path, error) from None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def digests(files: Sequence[Path], cache: Path) -> list[str]:
    """The SHA-256 of each file. A file whose size, times and inode are unchanged is not read again."""
    memo = cache / "digests" / f"{key([str(path) for path in files])}.json"
    known = read_json(memo)
    known = known if isinstance(known, dict) else {}

    def digest(path: Path) -> list[Any]:
        now, current = time.time_ns(), signature(path)
        before = known.get(str(path))
        if isinstance(before, list) and before[:-1] == current:
            return before
        settled = now - max(current[1], current[2]) > _RACY_NANOSECONDS
        return [*(current if settled else []), sha256(path)]

    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashing needs no lock of Python
        found = dict(zip(map(str, files), pool.map(digest, files), strict=True))
    if found != known:
        write_json(memo, found)
    return [str(found[str(path)][-1]) for path in files]
