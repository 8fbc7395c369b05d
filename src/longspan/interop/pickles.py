"""Reads state dicts from `torch.save` files and plain values from pickles, without executing them.

A pickle is a program. `pickle_machine` interprets it without running any of it, and returns a description: names, and
tensors as views of storages. This module reads the storages, from the zip archive that torch writes today or from the
sequence of pickles and storages that it wrote before 1.6. Declared sizes are checked against the file's size before
anything is allocated.
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

from longspan.errors import CheckpointError
from longspan.interop.pickle_machine import VOCABULARY_LIMIT, Damaged, Storage, Strided, run
from longspan.shapes import Tensor

ZIP_START = b"PK\x03\x04"
PICKLE_START = b"\x80"
# The format before torch 1.6 starts with these two numbers, each in its own pickle.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
PICKLE_LIMIT = 1 << 28
# What Python's zip reader raises for archives that are damaged, encrypted, truncated or use other compression.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError, RuntimeError, LookupError
)  # fmt: skip
# Together the tensors may be this many times as large as the file. A tied tensor has two names; a small vector that all
# layers share has one per layer.
MAX_ALIASES = 4
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Every tensor of the state dict in `path`, by name. Tensors that share a storage in the file share one here."""
    with _opened(path, "use a state dict saved by torch.save") as (file, total):
        start = file.read(len(ZIP_START))
        file.seek(0)
        if start == ZIP_START:
            return _read_zip(file, total)
        if start.startswith(PICKLE_START):
            return _read_legacy(BoundedFile(file, total))
        raise Damaged("it is neither of the two formats of torch.save")


def is_pickle(path: Path) -> bool:
    """Whether a file has the suffix or the first byte of a pickle; UTF-8 text cannot start with that byte."""
    with _opened(path, "use another file") as (file, _):
        return Path(path).suffix in (".pkl", ".pickle") or file.read(1) == PICKLE_START


def read_values(path: Path, wanted: str) -> dict[str, Any]:
    """The dict in a pickle, with `UNREAD` for objects of other types. Errors end with `wanted`, a hint to the user."""
    with _opened(path, wanted) as (file, total):
        values = run(BoundedFile(file, total), unread=True, limit=VOCABULARY_LIMIT)
        if type(values) is not dict:
            raise Damaged("it is not a dict")
        return values


@contextmanager
def _opened(path: Path, wanted: str) -> Iterator[tuple[IO[bytes], int]]:
    """A file and its size. Damage becomes a CheckpointError that ends with `wanted`."""
    try:
        with Path(path).open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except Damaged as error:
        raise CheckpointError(f"{path} cannot be imported: {error}; {wanted}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_zip(file: IO[bytes], total: int) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1:
                raise Damaged(f"the archive has {len(pickles)} files data.pkl, not one")
            root = pickles[0].removesuffix("data.pkl")
            if f"{root}byteorder" in members and _member(archive, members, f"{root}byteorder", 6) != b"little":
                raise Damaged("it was written on a big-endian machine")
            size = members[pickles[0]].file_size
            if size > min(total, PICKLE_LIMIT):
                raise Damaged(f"its data.pkl has {size} bytes, too many for a state dict")
            with archive.open(_uncompressed(members[pickles[0]])) as source:
                described = _state_dict(run(source.read()))
            storages = _storages(described, total)
            buffers = {key: _member(archive, members, f"{root}data/{key}", s.nbytes) for key, s in storages.items()}
    except ZIP_ERRORS as error:
        raise Damaged(f"the archive is damaged ({error!s:.80})") from None
    return _tensors(described, buffers)


def _uncompressed(member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The member, if it is not compressed: torch.save never compresses, and a compressed member could expand to any
    size."""
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise Damaged("a member of the archive is compressed")
    return member


def _member(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str, size: int) -> bytes:
    if name not in members:
        raise Damaged(f"the archive has no {name!r:.80}")
    if _uncompressed(members[name]).file_size != size:
        raise Damaged(f"{name!r:.80} has {members[name].file_size} bytes, not the declared {size}")
    content = archive.read(members[name])
    if len(content) != size:
        raise Damaged(f"{name!r:.80} is truncated")
    return content


class BoundedFile:
    """A file whose reads are limited to its size: Python allocates the requested number of bytes before it reads."""

    def __init__(self, file: IO[bytes], total: int) -> None:
        self.file, self.total = file, total
        self.readline, self.tell = file.readline, file.tell

    def read(self, count: int) -> bytes:
        return self.file.read(min(count, self.total))


def _read_legacy(file: BoundedFile) -> dict[str, Tensor]:
    """Five pickles (magic number, protocol, system, the object, the keys of the storages), then the storages."""
    if run(file) != LEGACY_MAGIC or run(file) != LEGACY_PROTOCOL:
        raise Damaged("it is neither of the two formats of torch.save")
    system = run(file)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise Damaged("it was not written on a little-endian machine")
    described = _state_dict(run(file))
    keys = run(file)
    storages = _storages(described, file.total)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise Damaged("its list of storages is damaged")
    buffers: dict[str, bytes] = {}
    # A storage that no tensor uses has an unknown dtype, so its size in bytes is unknown and reading cannot continue.
    for key in keys:
        if key not in storages or key in buffers:
            raise Damaged(f"its list of storages has {key!r:.40} twice, or no tensor uses it")
        numel = int.from_bytes(file.read(8), "little", signed=True)
        if numel != storages[key].numel:
            raise Damaged(f"storage {key!r:.40} has {numel} elements, not the declared {storages[key].numel}")
        buffers[key] = file.read(storages[key].nbytes)
        if len(buffers[key]) != storages[key].nbytes:
            raise Damaged("it is truncated")
    return _tensors(described, buffers)


def _state_dict(value: Any) -> dict[str, Strided]:
    """The state dict in an unpickled value: the value itself, or the dict under one of the usual names."""
    if type(value) is dict:
        value = next((value[key] for key in STATE_DICT_KEYS if type(value.get(key)) is dict), value)
    if type(value) is not dict or not value:
        raise Damaged("it is not a state dict")
    for name, tensor in value.items():
        if type(name) is not str:
            raise Damaged("it has a key that is not a string")
        if type(tensor) is not Strided:
            raise Damaged(f"{name!r:.80} is not a tensor")
    return value


def _storages(described: dict[str, Strided], total: int) -> dict[str, Storage]:
    """Every storage that the tensors use, by key. All storages together are at most as large as the file, all tensors
    at most MAX_ALIASES times as large."""
    storages: dict[str, Storage] = {}
    for tensor in described.values():
        if storages.setdefault(tensor.storage.key, tensor.storage) != tensor.storage:
            raise Damaged("two tensors describe their common storage differently")
    if sum(storage.nbytes for storage in storages.values()) > total:
        raise Damaged("it declares more bytes than it has")
    listed = sum(math.prod(tensor.size) * tensor.storage.dtype.itemsize for tensor in described.values())
    if listed > MAX_ALIASES * total:
        raise Damaged(f"its tensors need {listed} bytes, the file has {total}")
    return storages


def _tensors(described: dict[str, Strided], buffers: dict[str, bytes]) -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in described.items():
        storage = tensor.storage
        if storage.key not in flat:
            if storage.key not in buffers:
                raise Damaged(f"the storage of {name!r:.80} is missing")
            content = bytearray(buffers.pop(storage.key))
            if storage.dtype is torch.bool and any(content.translate(None, b"\x00\x01")):
                raise Damaged("a storage of booleans has values other than 0 and 1")
            empty = torch.empty(0, dtype=storage.dtype)
            flat[storage.key] = torch.frombuffer(content, dtype=storage.dtype) if content else empty
        tensors[name] = flat[storage.key].as_strided(tensor.size, tensor.stride, tensor.offset)
    return tensors
