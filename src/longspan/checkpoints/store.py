"""Folders and files that appear whole or not at all, and are read back only if not a byte has changed.

A folder is written aside, every file synced, a manifest of sizes and SHA-256 last, the folder synced, renamed into
place, its parent synced. A power cut at any instant leaves the old folder or the new one, never a part of either.
What a crash leaves behind carries a name of ours and is swept by the next writer.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from longspan.checkpoints import manifest
from longspan.checkpoints.manifest import Entry, Verified
from longspan.errors import CheckpointError

LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>new|old)(-[0-9a-f]{8})?\.longspan")
ATTEMPTS = 3

Content = bytes | Callable[[Path], object]


class CheckpointWarning(UserWarning):
    """A broken checkpoint that was passed over for an older one."""


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that is broken, and the sentence that says how."""

    path: Path
    reason: str


def write_folder(path: Path, files: Mapping[str, Content], *, replace: bool = False) -> dict[str, Entry]:
    """Make the folder `path` of `files` (name to bytes, or to a function that writes the path it is given)."""
    path = _resolved(path)
    for name in files:
        if not manifest.PLAIN_NAME.fullmatch(name) or name == manifest.MANIFEST:
            raise CheckpointError(f"a file of {path} cannot be called {name!r}; use letters, digits, '.', '_' and '-'")
    with _as_checkpoint_error(path), _parents(path.parent):
        sweep(path.parent, path.name)
        _refuse_occupied(path, replace)
        with _folder_aside(path) as fresh:
            entries = {name: _write_synced(fresh / name, content) for name, content in files.items()}
            _write_synced(fresh / manifest.MANIFEST, manifest.encode(entries))
            _sync(fresh)
            _put_in_place(fresh, path)
    return entries


def write_file(path: Path, content: bytes) -> None:
    """Make or replace one file: aside, synced, renamed, its folder synced."""
    path = _resolved(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        # A rename would put a plain file where a device or a pipe was.
        raise CheckpointError(f"{path} is a device or a pipe; give the name of a plain file")
    with _as_checkpoint_error(path), _parents(path.parent), new_file(path) as file:
        file.write(content)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file under a random name beside `path`, to read and write; it replaces `path`, also where that is a
    symbolic link, when the block ends without an error."""
    sweep(path.parent, path.name)
    fresh = _aside(path)
    try:
        with fresh.open("xb+") as file, _locked(file.fileno()):  # x: nothing that is there already is written to
            yield file
            file.flush()
            os.fsync(file.fileno())
            fresh.rename(path)
    finally:
        _remove(fresh)  # gone already if it was renamed
    _sync(path.parent)


def read_folder(path: Path, keep: Collection[str] = ()) -> Verified:
    """Check every file of `path` against its manifest, in one reading; keep the bytes of those named in `keep`."""
    path = _resolved(path)
    for _ in range(ATTEMPTS):
        found = locate(path)
        if found is None:
            raise CheckpointError(f"there is no folder {path}; check the name")
        before = _identity(found)
        try:
            return manifest.verify(found, path, keep)
        except CheckpointError:
            # A writer may have put a new folder here while the old one was read: then nothing is wrong with either.
            if _identity(locate(path)) == before:
                raise
    raise CheckpointError(f"{path} was replaced {ATTEMPTS} times while it was read; try again when its writer is done")


def locate(path: Path) -> Path | None:
    """Where the folder is: in its place, or set aside by a replacement that a crash cut short; None if nowhere."""
    return next((place for place in (path, _old(path)) if os.path.lexists(place)), None)


def newest_good(folder: Path, prefix: str = "checkpoint-", keep: Collection[str] = ()) -> "Newest":
    """The checkpoint of the highest number that is whole, with a warning for each broken one passed over."""
    passed_over: list[PassedOver] = []
    for path in numbered(folder, prefix):
        try:
            return Newest(read_folder(path, keep), tuple(passed_over))
        except CheckpointError as error:
            passed_over.append(PassedOver(path, str(error)))
            warnings.warn(f"{path.name} is passed over: {error}", CheckpointWarning, stacklevel=2)
    return Newest(None, tuple(passed_over))


@dataclass(frozen=True)
class Newest:
    """What `newest_good` found, if anything, and what it passed over, newest first."""

    found: Verified | None
    passed_over: tuple[PassedOver, ...]


def numbered(folder: Path, prefix: str = "checkpoint-") -> list[Path]:
    """The places `prefix`N in `folder`, highest N first; one that is only set aside counts as in its place."""
    folder = _resolved(folder)
    steps: set[int] = set()
    with suppress(OSError):
        for place in folder.iterdir():
            leftover = LEFTOVER.fullmatch(place.name)
            name = place.name if leftover is None else leftover["name"] if leftover["kind"] == "old" else ""
            if re.fullmatch(re.escape(prefix) + r"(0|[1-9][0-9]{0,17})", name):
                steps.add(int(name.removeprefix(prefix)))
    return [folder / f"{prefix}{step}" for step in sorted(steps, reverse=True)]


def sweep(folder: Path, name: str | None = None) -> None:
    """Clear away what crashed writers left in `folder` (of one target, or of all), and nothing else."""
    with suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            leftover = LEFTOVER.fullmatch(path.name)
            if leftover is None or name not in (None, leftover["name"]):
                continue
            target = folder / leftover["name"]
            if leftover["kind"] == "old" and not os.path.lexists(target):
                path.rename(target)
                _sync(folder)
            elif leftover["kind"] == "old" or not _in_use(path):
                _remove(path)


def _write_synced(path: Path, content: Content) -> Entry:
    if isinstance(content, bytes):
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return Entry(len(content), hashlib.sha256(content).hexdigest())
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    content(path)
    path.chmod(mode)  # safetensors makes files that only their owner may read
    _sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(file.tell(), digest)


def _refuse_occupied(path: Path, replace: bool) -> None:
    if not os.path.lexists(path) or _is_empty(path):
        return
    if not replace:
        raise CheckpointError(f"{path} already exists; choose another name, or remove it first")
    if not (path / manifest.MANIFEST).is_file():
        raise CheckpointError(f"{path} was not saved by longspan and is not replaced; choose another name")


def _put_in_place(fresh: Path, path: Path) -> None:
    """Rename `fresh` to `path`; a folder already there is set aside first, and a reader finds it there meanwhile."""
    old = _old(path)
    replaces = os.path.lexists(path) and not _is_empty(path)
    if replaces:
        path.rename(old)
    try:
        fresh.rename(path)
        _sync(path.parent)
    except BaseException:
        if not fresh.exists():
            path.rename(fresh)
        if replaces:
            old.rename(path)
        raise
    if replaces:
        _remove(old)


@contextmanager
def _folder_aside(path: Path) -> Iterator[Path]:
    """A new hidden folder beside `path`, gone afterwards unless it was renamed."""
    fresh = _aside(path)
    try:
        fresh.mkdir()
        with _opened(fresh) as descriptor, _locked(descriptor):
            yield fresh
    finally:
        _remove(fresh)


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Held while something is written aside, so that no other writer takes it for a leftover."""
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield


def _in_use(path: Path) -> bool:
    """Whether a writer that is alive holds this leftover: the lock of a dead one went with it."""
    with suppress(OSError), _opened(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _parents(folder: Path) -> Iterator[None]:
    """Make `folder` and the folders above it that are not there, and unmake them if what follows fails."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    made: list[Path] = []
    try:
        for place in reversed(missing):
            place.mkdir()
            made.append(place)
            _sync(place.parent)
        yield
    except BaseException:
        for place in reversed(made):
            with suppress(OSError):
                place.rmdir()
        raise


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = manifest.reason(error)
    except SafetensorError as error:
        why = str(error)
    else:
        return
    raise CheckpointError(f"{path} could not be saved: {why}; mend that and try again") from None


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _resolved(path: Path) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL
        raise CheckpointError(f"{str(path)!r} is no usable path; choose another") from None


def _aside(path: Path) -> Path:
    return path.parent / f".{path.name}.new-{secrets.token_hex(4)}.longspan"


def _old(path: Path) -> Path:
    return path.parent / f".{path.name}.old.longspan"


def _remove(path: Path) -> None:
    """Best effort: what cannot be removed now carries a name of ours and is swept later."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def _identity(path: Path | None) -> tuple[str, int, int] | None:
    try:
        status = path.stat() if path else None
    except OSError:
        return None
    return (str(path), status.st_dev, status.st_ino) if status else None
