"""State dicts out of `torch.save` files, old and new, and plain values out of a pickle, without executing them.

A pickle is a program; `pickle_machine` reads it without running it and gives a description: names, and tensors as
views of storages. This module finds the storages, in the zip archive torch writes today or in the row of pickles and
storages it wrote before 1.6. Sizes a file declares are held against its own size before anything is allocated.
"""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from longspan.checkpoints.pickle_machine import VOCABULARY_LIMIT, Damaged, Storage, Strided, run
from longspan.errors import CheckpointError
from longspan.shapes import Tensor

ZIP_START = b"PK\x03\x04"
PICKLE_START = b"\x80"
# The format before torch 1.6 begins with these two numbers, each a pickle of its own.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
PICKLE_LIMIT = 1 << 28
# What Python's zip reader raises for archives that are damaged, encrypted, compressed in odd ways or cut.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError, RuntimeError, LookupError
)  # fmt: skip
# A tied tensor has two names, a vector that every layer shares as many as there are layers.
LISTED = 4
NESTED = ("state_dict", "model_state_dict", "model")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Every tensor of the state dict in `path`, by name; tensors that share a storage go on sharing it."""
    with _opened(path, "give a state dict as torch.save writes it") as (file, total):
        start = file.read(len(ZIP_START))
        file.seek(0)
        if start == ZIP_START:
            return _read_zip(file, total)
        if start.startswith(PICKLE_START):
            return _read_legacy(Within(file, total))
        raise Damaged("it is neither of the two formats torch.save writes")


def is_pickle(path: Path) -> bool:
    """Whether a file is named or begins like a pickle; text in UTF-8 begins otherwise."""
    with _opened(path, "give another file") as (file, _):
        return Path(path).suffix in (".pkl", ".pickle") or file.read(1) == PICKLE_START


def read_values(path: Path, wanted: str) -> dict[str, Any]:
    """The dict in a plain pickle, objects of other kinds in it left unread; an error ends with what is `wanted`."""
    with _opened(path, wanted) as (file, total):
        values = run(Within(file, total), unread=True, limit=VOCABULARY_LIMIT)
        if type(values) is not dict:
            raise Damaged("it holds no dict")
        return values


@contextmanager
def _opened(path: Path, wanted: str) -> Iterator[tuple[IO[bytes], int]]:
    """A file and its size; what is wrong with it becomes an error that ends with what is wanted."""
    try:
        with Path(path).open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except Damaged as error:
        raise CheckpointError(f"{path} is not read: {error}; {wanted}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_zip(file: IO[bytes], total: int) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1:
                raise Damaged("the archive holds no data.pkl of its own")
            root = pickles[0].removesuffix("data.pkl")
            if f"{root}byteorder" in members and _member(archive, members, f"{root}byteorder", 6) != b"little":
                raise Damaged("it was written on a big-endian machine")
            size = members[pickles[0]].file_size
            if size > min(total, PICKLE_LIMIT):
                raise Damaged("its data.pkl is larger than any state dict's")
            with archive.open(_plain(members[pickles[0]])) as source:
                described = _state_dict(run(source.read()))
            storages = _storages(described, total)
            buffers = {key: _member(archive, members, f"{root}data/{key}", s.nbytes) for key, s in storages.items()}
    except ZIP_ERRORS as error:
        raise Damaged(f"the archive is damaged ({error!s:.80})") from None
    return _tensors(described, buffers)


def _plain(member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """torch.save never compresses, so a member that is compressed has something else in mind."""
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise Damaged("a member of the archive is compressed")
    return member


def _member(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str, size: int) -> bytes:
    if name not in members:
        raise Damaged(f"the archive lacks {name!r:.80}")
    if _plain(members[name]).file_size != size:
        raise Damaged(f"{name!r:.80} has {members[name].file_size} bytes where {size} are declared")
    content = archive.read(members[name])
    if len(content) != size:
        raise Damaged(f"{name!r:.80} is cut")
    return content


class Within:
    """A file that is never asked for more than it has: Python sets aside what is asked for before it reads."""

    def __init__(self, file: IO[bytes], total: int) -> None:
        self.file, self.total = file, total
        self.readline, self.tell = file.readline, file.tell

    def read(self, count: int) -> bytes:
        return self.file.read(min(count, self.total))


def _read_legacy(file: Within) -> dict[str, Tensor]:
    """Magic number, protocol, system, the object, the storages' keys: five pickles; then the storages."""
    if run(file) != LEGACY_MAGIC or run(file) != LEGACY_PROTOCOL:
        raise Damaged("it is neither of the two formats torch.save writes")
    system = run(file)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise Damaged("it was not written on a little-endian machine")
    described = _state_dict(run(file))
    keys = run(file)
    storages = _storages(described, file.total)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise Damaged("its list of storages is damaged")
    buffers: dict[str, bytes] = {}
    # Keys are sorted as strings; one that the state dict does not use has an unknown width, so it ends the reading.
    for key in keys:
        if key not in storages or key in buffers:
            raise Damaged(f"its list of storages names {key!r:.40}, which no tensor uses, or names it twice")
        numel = int.from_bytes(file.read(8), "little", signed=True)
        if numel != storages[key].numel:
            raise Damaged(f"storage {key!r:.40} holds {numel} numbers where {storages[key].numel} are declared")
        buffers[key] = file.read(storages[key].nbytes)
        if len(buffers[key]) != storages[key].nbytes:
            raise Damaged("it is cut")
    return _tensors(described, buffers)


def _state_dict(value: Any) -> dict[str, Strided]:
    """The state dict in what a pickle describes: the whole of it, or the table under one of the usual names."""
    if type(value) is dict:
        value = next((value[key] for key in NESTED if type(value.get(key)) is dict), value)
    if type(value) is not dict or not value:
        raise Damaged("it holds no state dict")
    for name, tensor in value.items():
        if type(name) is not str or type(tensor) is not Strided:
            raise Damaged(f"it holds {name!r:.80}, which is no tensor" if type(name) is str else "it names no tensors")
    return value


def _storages(described: dict[str, Strided], total: int) -> dict[str, Storage]:
    """Every storage the tensors use, once; together no larger than the file, and the tensors not much larger."""
    storages: dict[str, Storage] = {}
    for tensor in described.values():
        if storages.setdefault(tensor.storage.key, tensor.storage) != tensor.storage:
            raise Damaged("two tensors disagree about the storage they share")
    if sum(storage.nbytes for storage in storages.values()) > total:
        raise Damaged("it declares more numbers than it holds")
    listed = sum(math.prod(tensor.size) * tensor.storage.dtype.itemsize for tensor in described.values())
    if listed > LISTED * total:
        raise Damaged(f"its tensors take {listed} bytes, many times what it holds")
    return storages


def _tensors(described: dict[str, Strided], buffers: dict[str, bytes]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in described.items():
        storage = tensor.storage
        if storage.key not in whole:
            if storage.key not in buffers:
                raise Damaged(f"the storage of {name!r:.80} is missing")
            content = bytearray(buffers.pop(storage.key))
            if storage.dtype is torch.bool and any(content.translate(None, b"\x00\x01")):
                raise Damaged("a storage of truth values holds something else")
            empty = torch.empty(0, dtype=storage.dtype)
            whole[storage.key] = torch.frombuffer(content, dtype=storage.dtype) if content else empty
        tensors[name] = whole[storage.key].as_strided(tensor.size, tensor.stride, tensor.offset)
    return tensors
