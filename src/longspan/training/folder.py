"""The folder of a run: who may train in it, what may be in it before, and what it says about the run."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from longspan.checkpoints import store
from longspan.checkpoints.manifest import MANIFEST, Verified
from longspan.checkpoints.model_folder import WEIGHTS
from longspan.data import Encoded
from longspan.data.cache import sync
from longspan.errors import CheckpointError, ConfigError
from longspan.training.environment import describe
from longspan.training.recipe import Recipe
from longspan.training.snapshot import PARTS, RECIPE, TENSORS

ENVIRONMENT, ORIGIN = "run.json", "began_at"
# What decides every bit of the steps that follow a checkpoint; its other files also say how long the run took.
DECIDING = (WEIGHTS, TENSORS)
ATTEMPTS = 10


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Make the folder where there is none and hold its lock: two processes would overwrite each other's files.

    The lock ends with the process. A folder made here is removed again if nothing was written to it.
    """
    descriptor, made = _claim(out)
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(descriptor)


def _claim(out: Path) -> tuple[int, list[Path]]:
    """The folder, open and locked, and which folders were made for it, the innermost first."""
    made: list[Path] = []
    try:
        place = out.resolve()
        for _ in range(ATTEMPTS):
            # Another process may remove a folder that it made: then the next attempt makes it.
            with suppress(FileNotFoundError):
                made = [*_make(place), *made]
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    _lock(descriptor, out)
                    if os.path.samestat(os.fstat(descriptor), place.stat()):
                        return descriptor, made
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        why = "it was removed meanwhile"
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--out {out} is a file or lies in one; give the name of a folder") from None
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        why = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"--out {out} cannot be used: {why}; choose another folder")


def _make(place: Path) -> list[Path]:
    """Make a folder and the folders above it that are missing; gives those made here, the innermost first."""
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    made = []
    for folder in reversed(missing):
        with suppress(FileExistsError):  # made by another process in the meantime
            folder.mkdir()
            made.append(folder)
            sync(folder.parent)
    return made[::-1]


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process trains in {out}; wait for its end, or choose another --out") from None
    except OSError:  # some network file systems have no locks
        pass


def check_folder(out: Path, resume: str | None) -> None:
    """An output folder is empty, holds what a killed start left, or holds the run that is to be resumed."""
    if all(_is_ours(path) for path in out.iterdir()):
        return
    if not (out / RECIPE).is_file() or (out / MANIFEST).exists():
        raise ConfigError(f"--out {out} is not empty and holds no run; choose another folder")
    if resume is None:
        raise ConfigError(f"--out {out} holds a run; add --resume auto to go on with it, or choose another folder")


def _is_ours(path: Path) -> bool:
    """Whether a start that was killed left this file: `write_about` writes recipe.toml last, and that makes the run."""
    leftover = store.LEFTOVER.fullmatch(path.name)
    if leftover is not None:
        return leftover["kind"] == "new" and leftover["name"] in (RECIPE, ENVIRONMENT)
    return path.name == ENVIRONMENT and "processes" in read_about(path.parent)


def write_about(out: Path, recipe: Recipe, text: Encoded, device: torch.device, start: Verified | None) -> None:
    """run.json with an entry for each process that worked on the run, then recipe.toml.

    A run that began at a checkpoint of another run, `start`, says at which.
    """
    before = read_about(out)
    processes = before.get("processes")
    about = {
        "data": {"name": text.name, "split": text.split, "tokens": len(text), "fingerprint": text.fingerprint},
        "processes": [*(processes if isinstance(processes, list) else []), describe(device)],
    }
    if start is not None and is_own(start, out):
        about |= {ORIGIN: before[ORIGIN]} if ORIGIN in before else {}
    elif start is not None:
        about[ORIGIN] = {"checkpoint": str(start.path), "sha256": {name: start.files[name].sha256 for name in DECIDING}}
    store.write_file(out / ENVIRONMENT, (json.dumps(about, indent=1) + "\n").encode())
    store.write_file(out / RECIPE, recipe.to_toml().encode())


def is_own(start: Verified, out: Path) -> bool:
    """Whether a checkpoint is one of the run in `out`."""
    return start.path.parent.resolve() == out.resolve()


def find_origin(out: Path) -> Verified | None:
    """The checkpoint of another run that the run in `out` began at; None for a run that began with new weights."""
    noted = read_about(out).get(ORIGIN)
    if noted is None:
        return None
    said = f"{out} began at a checkpoint of another run and has saved none of its own"
    way = "bring that checkpoint back, or choose another --out"
    try:
        path, digests = Path(noted["checkpoint"]), {name: noted["sha256"][name] for name in DECIDING}
    except (LookupError, TypeError):
        raise CheckpointError(f"{said}, and {ENVIRONMENT} does not say which; choose another --out") from None
    try:
        found = store.read_folder(path, PARTS)
    except CheckpointError as error:
        raise CheckpointError(f"{said}: {error}; {way}") from None
    if any(found.files[name].sha256 != digest for name, digest in digests.items()):
        raise CheckpointError(f"{said}, and {path} has changed since; {way}")
    return found


def read_about(out: Path) -> dict[str, Any]:
    """What run.json says; nothing where it is missing or damaged."""
    try:
        about = json.loads((out / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
