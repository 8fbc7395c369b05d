"""The folder of a run: its lock, what it may contain at the start, and run.json."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from longspan.checkpoints import store
from longspan.checkpoints.manifest import MANIFEST, Verified
from longspan.data.cache import sync
from longspan.errors import CheckpointError, ConfigError
from longspan.training.environment import describe
from longspan.training.recipe import Recipe
from longspan.training.snapshot import PARTS, RECIPE


@runtime_checkable
class TrainedOn(Protocol):
    """What run.json says about the data of a run."""

    @property
    def name(self) -> str: ...
    @property
    def split(self) -> str | None: ...
    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...


ENVIRONMENT, ORIGIN = "run.json", "began_at"
ATTEMPTS = 10


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create the folder if needed and lock it, because two processes would overwrite each other's files.

    The lock ends with the process. A folder created here is removed again if nothing was written to it.
    """
    descriptor, created = _open_locked(out)
    try:
        yield
    finally:
        for folder in created:
            with suppress(OSError):  # not empty
                folder.rmdir()
        os.close(descriptor)


def _open_locked(out: Path) -> tuple[int, list[Path]]:
    """A descriptor of the locked folder, and the folders created for it, innermost first."""
    created: list[Path] = []
    try:
        place = out.resolve()
        for _ in range(ATTEMPTS):
            # Another process may remove a folder that it created. The next attempt then creates it again.
            with suppress(FileNotFoundError):
                created = [*_create(place), *created]
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    _lock(descriptor, out)
                    if os.path.samestat(os.fstat(descriptor), place.stat()):
                        return descriptor, created
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        why = "another process keeps removing it"
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{out} is a file, or inside a file; use a folder") from None
    except (OSError, RuntimeError) as error:  # a loop of symbolic links is a RuntimeError
        why = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"{out} cannot be used: {why}; use another folder")


def _create(place: Path) -> list[Path]:
    """Create a folder and its missing parents. Returns the folders created, innermost first."""
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    created = []
    for folder in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir()
            created.append(folder)
            sync(folder.parent)
    return created[::-1]


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is training in {out}; wait until it ends, or use another folder") from None
    except OSError:  # some network file systems have no locks
        pass


def check_folder(out: Path, resume: str | None) -> None:
    """An output folder must be empty, contain the leftovers of a killed start, or contain the run to resume."""
    if all(_is_leftover(path) for path in out.iterdir()):
        return
    if not (out / RECIPE).is_file() or (out / MANIFEST).exists():
        raise ConfigError(f"{out} is not empty and contains no run; use another folder")
    if resume is None:
        raise ConfigError(
            f"{out} already contains a run; continue it with resume='auto' (--resume auto), or use another folder"
        )


def _is_leftover(path: Path) -> bool:
    """Whether a killed start left this file. `write_run_info` writes recipe.toml last, and that file makes it a run."""
    leftover = store.LEFTOVER.fullmatch(path.name)
    if leftover is not None:
        return leftover["kind"] == "new" and leftover["name"] in (RECIPE, ENVIRONMENT)
    return path.name == ENVIRONMENT and "processes" in read_run_info(path.parent)


def write_run_info(
    out: Path, recipe: Recipe, text: TrainedOn, device: torch.device, start: Verified | None, ranks: int = 1
) -> None:
    """Write run.json with an entry for each launch of the run, on so many ranks, then recipe.toml.

    A branch, a run that starts from a checkpoint of another run, records that checkpoint.
    """
    before = read_run_info(out)
    processes = before.get("processes")
    about = {
        "data": {"name": text.name, "split": text.split, "tokens": len(text), "fingerprint": text.fingerprint},
        "processes": [
            *(processes if isinstance(processes, list) else []),
            describe(device) | ({"ranks": ranks} if ranks > 1 else {}),
        ],
    }
    if start is not None and is_own(start, out):
        about |= {ORIGIN: before[ORIGIN]} if ORIGIN in before else {}
    elif start is not None:
        about[ORIGIN] = {"checkpoint": str(start.path), "sha256": _deciding(start)}
    store.write_file(out / ENVIRONMENT, (json.dumps(about, indent=1) + "\n").encode())
    store.write_file(out / RECIPE, recipe.to_toml().encode())


def recorded_threads(out: Path) -> int:
    """The threads of the last launch of a run on a CPU, else 0. A run that is resumed with as many stays exact."""
    processes = read_run_info(out).get("processes")
    last = processes[-1] if isinstance(processes, list) and processes else None
    if not isinstance(last, dict) or last.get("device") != "cpu":
        return 0
    threads = last.get("threads")
    return threads if isinstance(threads, int) and 0 < threads <= 1024 else 0


def is_own(start: Verified, out: Path) -> bool:
    """Whether a checkpoint belongs to the run in `out`."""
    return start.path.parent.resolve() == out.resolve()


def find_origin(out: Path) -> Verified | None:
    """The checkpoint from which the branch in `out` started; None for a run that started with new weights."""
    origin = read_run_info(out).get(ORIGIN)
    if origin is None:
        return None
    branch = f"{out} is a branch without a checkpoint of its own"
    fix = "restore that checkpoint, or use another folder"
    try:
        path, digests = Path(origin["checkpoint"]), origin["sha256"]
    except (LookupError, TypeError):
        raise CheckpointError(
            f"{branch}, and {ENVIRONMENT} does not say which checkpoint it started from; use another folder"
        ) from None
    try:
        found = store.read_folder(path, PARTS)
    except CheckpointError as error:
        raise CheckpointError(
            f"{branch}, and the checkpoint it started from is missing or damaged: {error}; {fix}"
        ) from None
    if _deciding(found) != digests:
        raise CheckpointError(f"{branch}, and the checkpoint it started from, {path}, has changed; {fix}")
    return found


def _deciding(checkpoint: Verified) -> dict[str, str]:
    """Hashes of the files that determine all later steps. The others contain times, which differ between runs."""
    return {name: entry.sha256 for name, entry in checkpoint.files.items() if name.endswith(".safetensors")}


def read_run_info(out: Path) -> dict[str, Any]:
    """The contents of run.json; empty if it is missing or damaged."""
    try:
        about = json.loads((out / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
