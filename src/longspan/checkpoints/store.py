"""Atomic writes of folders and files, and verified reads.

A folder is written under a temporary name: every file is synced, the manifest (sizes and SHA-256) is written last, the
folder is synced and renamed, and its parent is synced. A power loss at any moment leaves the old folder or the new one,
never a mixture. Temporary files of a crashed writer have names that match `LEFTOVER`; the next writer removes them.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
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
    """A damaged checkpoint was passed over and an older one is used."""


@dataclass(frozen=True)
class PassedOver:
    """A damaged checkpoint, and the message that says what is wrong with it."""

    path: Path
    reason: str


def write_folder(path: Path, files: Mapping[str, Content], *, replace: bool = False) -> dict[str, Entry]:
    """Create the folder `path` atomically. `files` maps names to bytes, or to functions that write a given path."""
    path = _resolve(path)
    for name in files:
        if not manifest.FILE_NAME.fullmatch(name) or name == manifest.MANIFEST:
            raise CheckpointError(f"{name!r} is not a valid file name in {path}; use letters, digits, '.', '_' and '-'")
    with new_folder(path, replace=replace) as folder:
        for name, content in files.items():
            folder.write(name, content)
    return folder.entries


class NewFolder:
    """A folder under its temporary name, and the manifest entries of its files so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}

    def write(self, name: str, content: Content) -> None:
        self.entries[name] = _write_synced(self.path / name, content)

    def adopt(self, name: str) -> None:
        """Add a file that someone else has written."""
        self.entries[name] = _synced_entry(self.path / name)


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[NewFolder]:
    """A new folder that gets its manifest and its name `path` when the block ends without an error."""
    path = _resolve(path)
    with _as_checkpoint_error(path), _parent_folders(path.parent):
        sweep(path.parent, path.name)
        _require_free(path, replace)
        with _temporary_folder(path) as temporary:
            folder = NewFolder(temporary)
            yield folder
            _write_synced(temporary / manifest.MANIFEST, manifest.encode(folder.entries))
            _sync(temporary)
            _put_in_place(temporary, path)


def write_file(path: Path, content: bytes) -> None:
    """Create or replace one file atomically."""
    path = _resolve(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; use the path of a file")
    if path.exists() and not path.is_file():
        # A rename would replace the device or pipe with a regular file.
        raise CheckpointError(f"{path} is a device or a pipe; use the path of a regular file")
    with _as_checkpoint_error(path), _parent_folders(path.parent), new_file(path) as file:
        file.write(content)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file under a temporary name in the same folder, to read and write. It replaces `path` when the block ends
    without an error; a symbolic link at `path` is replaced, not followed."""
    sweep(path.parent, path.name)
    locked = False
    while not locked:
        temporary = temporary_path(path)
        try:
            with temporary.open("xb+") as file:  # x: fails if the name exists, link or not
                locked = _lock(file.fileno(), temporary)
                if locked:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.rename(path)
        finally:
            _remove(temporary)  # does nothing after the rename
    _sync(path.parent)


def read_folder(path: Path, keep: Collection[str] = ()) -> Verified:
    """Check every file of `path` against its manifest in one pass; keep the bytes of the files named in `keep`."""
    path = _resolve(path)
    for _ in range(ATTEMPTS):
        found = locate(path)
        if found is None:
            raise CheckpointError(f"there is no folder {path}; check the name")
        before = _identity(found)
        try:
            return manifest.verify(found, path, keep)
        except CheckpointError:
            # A writer may have replaced the folder during the read; then neither version is damaged.
            if _identity(locate(path)) == before:
                raise
    raise CheckpointError(
        f"{path} was replaced {ATTEMPTS} times while it was being read; try again when no process writes to it"
    )


def locate(path: Path) -> Path | None:
    """The folder's current path: `path`, or its `.old` name if a crash interrupted a replacement. None if neither
    exists."""
    return next((candidate for candidate in (path, _old_path(path)) if os.path.lexists(candidate)), None)


def newest_good(folder: Path, prefix: str = "checkpoint-", keep: Collection[str] = ()) -> "Newest":
    """The undamaged checkpoint with the highest number. Each damaged one above it is passed over with a warning."""
    passed_over: list[PassedOver] = []
    for path in numbered(folder, prefix):
        try:
            return Newest(read_folder(path, keep), tuple(passed_over))
        except CheckpointError as error:
            passed_over.append(PassedOver(path, str(error)))
            warnings.warn(f"skipped {path.name}: {error}", CheckpointWarning, stacklevel=2)
    return Newest(None, tuple(passed_over))


@dataclass(frozen=True)
class Newest:
    """The result of `newest_good`: the checkpoint, or None, and those passed over, newest first."""

    found: Verified | None
    passed_over: tuple[PassedOver, ...]


def numbered(folder: Path, prefix: str = "checkpoint-") -> list[Path]:
    """The paths `prefix`N in `folder`, highest N first. A folder that exists only under its `.old` name is listed under
    its own name."""
    folder = _resolve(folder)
    steps: set[int] = set()
    with suppress(OSError):
        for path in folder.iterdir():
            leftover = LEFTOVER.fullmatch(path.name)
            name = path.name if leftover is None else leftover["name"] if leftover["kind"] == "old" else ""
            if re.fullmatch(re.escape(prefix) + r"(0|[1-9][0-9]{0,17})", name):
                steps.add(int(name.removeprefix(prefix)))
    return [folder / f"{prefix}{step}" for step in sorted(steps, reverse=True)]


def sweep(folder: Path, name: str | None = None) -> None:
    """Clean up after crashed writers in `folder`: restore or remove what matches `LEFTOVER`, for one target
    or for all."""
    with suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            leftover = LEFTOVER.fullmatch(path.name)
            if leftover is None or name not in (None, leftover["name"]):
                continue
            target = folder / leftover["name"]
            if leftover["kind"] == "old" and not os.path.lexists(target):
                path.rename(target)
                _sync(folder)
            elif leftover["kind"] == "old":
                _remove(path)
            else:
                _remove_unless_locked(path)


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
    path.chmod(mode)  # safetensors creates files that only the owner can read
    return _synced_entry(path)


def _synced_entry(path: Path) -> Entry:
    _sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(file.tell(), digest)


def _require_free(path: Path, replace: bool) -> None:
    if not os.path.lexists(path) or _is_empty(path):
        return
    if not replace:
        raise CheckpointError(f"{path} already exists; choose another name or remove it first")
    if not (path / manifest.MANIFEST).is_file():
        raise CheckpointError(f"{path} was not saved by longspan, so it is not replaced; choose another name")


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`. An existing folder is first renamed to its `.old` name, where readers look next."""
    old = _old_path(path)
    replaces = os.path.lexists(path) and not _is_empty(path)
    if replaces:
        path.rename(old)
    try:
        temporary.rename(path)
        _sync(path.parent)
    except BaseException:
        if not temporary.exists():
            path.rename(temporary)
        if replaces:
            old.rename(path)
        raise
    if replaces:
        _remove(old)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A new hidden folder in the parent of `path`, removed afterwards unless it was renamed."""
    locked = False
    while not locked:
        temporary = temporary_path(path)
        try:
            temporary.mkdir()
            with ExitStack() as stack:
                with suppress(FileNotFoundError):
                    locked = _lock(stack.enter_context(_open_descriptor(temporary)), temporary)
                if locked:
                    yield temporary
        finally:
            _remove(temporary)


def _lock(descriptor: int, temporary: Path) -> bool:
    """Lock a new temporary file or folder, so that other writers do not remove it as a leftover. False if one of them
    removed it before it was locked."""
    with suppress(OSError):  # some network file systems do not support locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits at most until another writer has removed it
    return temporary.exists()


def _remove_unless_locked(path: Path) -> None:
    """Remove a file or folder unless a running writer uses it. The lock of a crashed one was released with its process.
    It is removed under the lock, so that a writer that has just created it notices."""
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(_open_descriptor(path))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass  # no lock is possible, for example on a symbolic link
        _remove(path)


@contextmanager
def _parent_folders(folder: Path) -> Iterator[None]:
    """Create `folder` and its missing parents; remove the created ones again if the block fails."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    created: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            created.append(path)
            _sync(path.parent)
        yield
    except BaseException:
        for path in reversed(created):
            with suppress(OSError):
                path.rmdir()
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
    raise CheckpointError(f"{path} could not be saved: {why}; fix that and try again") from None


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _resolve(path: Path) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of symbolic links, a NUL character
        raise CheckpointError(f"{str(path)!r} is not a valid path; choose another") from None


def temporary_path(path: Path) -> Path:
    """A name for a temporary file next to `path`. If its writer is killed, the next writer of `path` removes it."""
    return path.parent / f".{path.name}.new-{secrets.token_hex(4)}.longspan"


def _old_path(path: Path) -> Path:
    return path.parent / f".{path.name}.old.longspan"


def _remove(path: Path) -> None:
    """Best effort: what cannot be removed now matches `LEFTOVER` and is removed by a later `sweep`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def _open_descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with _open_descriptor(path) as descriptor:
        os.fsync(descriptor)


def _identity(path: Path | None) -> tuple[str, int, int] | None:
    try:
        status = path.stat() if path else None
    except OSError:
        return None
    return (str(path), status.st_dev, status.st_ino) if status else None
