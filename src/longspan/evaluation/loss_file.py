"""Per-token losses of a text as a file, `.npy` or `.csv`, that takes its name only when it is complete."""

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
_HEADER = b"position,nats\n"  # position k is token k of the text, counted from 0; the first one scored is 1
_ROWS = 1 << 16


@dataclass(frozen=True)
class _Format:
    """`begins` is how every such file begins; `reserve` takes the disk space and gives the array to fill; `finish`
    writes what is not written yet."""

    begins: bytes
    reserve: Callable[[IO[bytes], int], Losses]
    finish: Callable[[IO[bytes], Losses], None]


def check_loss_file(path: Path, data: str) -> None:
    """Refuse a path that cannot be written, that is part of the text or that holds anything but losses."""
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--losses {path}: {path} is a folder, or there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        # A rename would put a plain file where a device or a pipe was.
        raise ConfigError(f"--losses {path} is a device or a pipe; give the name of a plain file")
    place = path.resolve()
    if path.exists() and data not in CORPORA and Path(data).resolve() in (place, *place.parents):
        raise ConfigError(f"--losses {path} is part of the text that is read, {data}; give the name of another file")
    begins = _format(path).begins
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(begins)) not in (b"", begins):
                raise ConfigError(f"--losses {path} is a file of another kind; give the name of a new file")


@contextmanager
def loss_file(path: Path | None, count: int) -> Iterator[Losses | None]:
    """An array of `count` losses to fill; the file appears under its name when the block ends without an error."""
    if path is None or count < 1:
        yield None
        return
    form = _format(path)
    with ExitStack() as stack:
        with _refusing(path):
            file = stack.enter_context(new_file(path))
            losses = form.reserve(file, count)
        yield losses
        with _refusing(path):
            form.finish(file, losses)
            stack.close()


def _format(path: Path) -> _Format:
    found = _FORMATS.get(path.suffix.lower())
    if found is None:
        raise ConfigError(f"--losses {path} must end in {' or '.join(_FORMATS)}")
    return found


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--losses {path} cannot be written: {error.strerror}") from None


def _map_npy(file: IO[bytes], count: int) -> Losses:
    """An array on disk with all its space taken: a mapped file that meets a full disk later ends the process."""
    kind = np.dtype(np.float32)
    about: dict[str, Any] = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, about)
    begin = file.tell()
    _take(file, begin + count * kind.itemsize)
    return np.memmap(file, kind, "r+", begin, (count,))  # type: ignore[call-overload,no-any-return]


def _flush_npy(_: IO[bytes], losses: Losses) -> None:
    losses.flush()  # type: ignore[attr-defined]


def _reserve_csv(file: IO[bytes], count: int) -> Losses:
    longest = len(f"{count},-1.00000000e-38\n")
    _take(file, len(_HEADER) + count * longest)
    return np.empty(count, np.float32)


def _write_csv(file: IO[bytes], losses: Losses) -> None:
    file.write(_HEADER)
    for begin in range(0, len(losses), _ROWS):
        rows = enumerate(losses[begin : begin + _ROWS].tolist(), start=begin + 1)
        file.write("".join(f"{position},{loss:.9g}\n" for position, loss in rows).encode("ascii"))
    file.truncate()


def _take(file: IO[bytes], size: int) -> None:
    file.flush()
    os.posix_fallocate(file.fileno(), 0, size)


_FORMATS = {
    ".npy": _Format(b"\x93NUMPY", _map_npy, _flush_npy),
    ".csv": _Format(_HEADER, _reserve_csv, _write_csv),
}
