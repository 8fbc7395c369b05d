"""Per-token losses of a text as a file, `.npy` or `.csv`, which appears under its name only when it is complete."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from longspan.checkpoints.store import new_file
from longspan.data import CORPORA
from longspan.errors import ConfigError

Losses = NDArray[np.float32]
_HEADER = b"position,nats\n"  # position k is token k of the text, counted from 0; the first scored token is 1
_ROWS = 1 << 16


@dataclass(frozen=True)
class _Format:
    """A file format for losses."""

    magic: bytes
    """The first bytes of every such file."""
    reserve: Callable[[IO[bytes], int], Losses]
    """Allocates the disk space and returns the array to fill."""
    finish: Callable[[IO[bytes], Losses], None]
    """Writes the array to the file."""


def check_loss_file(path: Path, data: str) -> None:
    """Refuse a path that cannot be written, is part of the text, or is a file that does not hold losses."""
    if path.is_dir():
        raise ConfigError(f"the loss file {path} is a folder; use the path of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"the loss file {path}: there is no folder {path.parent}; create it first")
    if path.exists() and not path.is_file():
        # A rename would replace the device or pipe by a regular file.
        raise ConfigError(f"the loss file {path} is a device or a pipe; use the path of a regular file")
    resolved = path.resolve()
    if path.exists() and data not in CORPORA and Path(data).resolve() in (resolved, *resolved.parents):
        raise ConfigError(f"the loss file {path} is part of the text {data}; use another path")
    magic = _format(path).magic
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(magic)) not in (b"", magic):
                raise ConfigError(f"the loss file {path} exists and is not a loss file; use another path")


@contextmanager
def loss_file(path: Path | None, count: int) -> Iterator[Losses | None]:
    """An array of `count` losses to fill; the file appears under its name when the block ends without an error."""
    if path is None or count < 1:
        yield None
        return
    chosen = _format(path)
    with ExitStack() as stack:
        with _write_errors(path):
            file = stack.enter_context(new_file(path))
            losses = chosen.reserve(file, count)
        yield losses
        with _write_errors(path):
            chosen.finish(file, losses)
            stack.close()


def _format(path: Path) -> _Format:
    found = _FORMATS.get(path.suffix.lower())
    if found is None:
        raise ConfigError(f"the loss file {path} has an unknown suffix; the name must end in {' or '.join(_FORMATS)}")
    return found


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the loss file {path} cannot be written: {error.strerror}") from None


def _map_npy(file: IO[bytes], count: int) -> Losses:
    """An array on disk with its space reserved: a write to a mapped file on a full disk would kill the process."""
    dtype = np.dtype(np.float32)
    header: dict[str, Any] = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    begin = file.tell()
    _allocate(file, begin + count * dtype.itemsize)
    return np.memmap(file, dtype, "r+", begin, (count,))  # type: ignore[call-overload,no-any-return]


def _flush_npy(_: IO[bytes], losses: Losses) -> None:
    losses.flush()  # type: ignore[attr-defined]


def _reserve_csv(file: IO[bytes], count: int) -> Losses:
    longest = len(f"{count},-1.00000000e-38\n")
    _allocate(file, len(_HEADER) + count * longest)
    return np.empty(count, np.float32)


def _write_csv(file: IO[bytes], losses: Losses) -> None:
    file.write(_HEADER)
    for begin in range(0, len(losses), _ROWS):
        rows = enumerate(losses[begin : begin + _ROWS].tolist(), start=begin + 1)
        file.write("".join(f"{position},{loss:.9g}\n" for position, loss in rows).encode("ascii"))
    file.truncate()


def _allocate(file: IO[bytes], size: int) -> None:
    file.flush()
    os.posix_fallocate(file.fileno(), 0, size)


_FORMATS = {
    ".npy": _Format(b"\x93NUMPY", _map_npy, _flush_npy),
    ".csv": _Format(_HEADER, _reserve_csv, _write_csv),
}
