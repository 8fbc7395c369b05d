"""Archives and compressed files, unpacked without trust.

Nothing an archive says decides where a byte goes: members are walked one by one, only regular files and folders are
taken, names are checked by us (Python 3.11.7's own tar filter can be bypassed), files are opened so that they cannot
exist yet, and what comes out is counted against a limit as it comes.
"""

import bz2
import gzip
import io
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from longspan.errors import DataError

_TAR = {".tar": "", ".tgz": ".gz", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz"}
_STREAMS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_BLOCK = 1 << 20
_MEMBERS = 100_000
_HEADER_BYTES = 1 << 16
_NAME_BYTES, _PATH_BYTES, _DEPTH = 255, 1000, 32
_DAMAGE = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    struct.error,
    ArithmeticError,
    LookupError,
    ValueError,
    RuntimeError,
)


def kind_of(path: Path) -> Literal["tar", "zip", "stream"] | None:
    """What a file's name says it is: several files, one compressed file, or a plain text (None)."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    last = suffixes[-1] if suffixes else ""
    if last in _TAR or (last in _STREAMS and suffixes[0] == ".tar"):
        return "tar"
    return "zip" if last == ".zip" else "stream" if last in _STREAMS else None


def default_limit(path: Path) -> int:
    """How much an archive may unpack to: far more than text compresses by, far less than a bomb."""
    return max(1 << 30, 200 * path.stat().st_size)


def unpack(path: Path, folder: Path, limit: int | None = None, only: Collection[str] | None = None) -> list[Path]:
    """Unpacks `path` below the empty `folder`; gives the files. `only` takes members of these base names alone.

    Any error leaves what had come so far in `folder`, for the caller to remove.
    """
    try:
        allowed = default_limit(path) if limit is None else limit
        taken = _Taken(path, folder, allowed)
        kind = kind_of(path)
        if kind == "tar":
            _untar(path, taken, only)
        elif kind == "zip":
            _unzip(path, taken, only)
        else:
            with _decompressed(path) as stream:
                taken.file(path.stem, stream)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except _DAMAGE as error:
        raise DataError(f"{path} cannot be unpacked: {error or type(error).__name__}; it is damaged or cut") from None
    return taken.files


class _Taken:
    """What has come out of an archive, and the rules it came out by."""

    def __init__(self, archive: Path, folder: Path, limit: int) -> None:
        self.archive, self.folder, self.limit = archive, folder, limit
        self.files: list[Path] = []
        self.members = self.bytes = 0

    def refuse(self, name: str, why: str) -> DataError:
        return DataError(f"{self.archive} is not unpacked: its member {name[:80]!r} {why}")

    def place(self, name: str) -> Path:
        """Where a member goes; a name that could lead elsewhere, or nowhere, is refused."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\\" in name or (parts and ":" in parts[0]):
            raise self.refuse(name, "would lie outside the folder")
        try:
            lengths = [len(part.encode("utf-8")) for part in parts]
        except UnicodeEncodeError:
            raise self.refuse(name, "has a name that is not UTF-8") from None
        if not parts or "\0" in name:
            raise self.refuse(name, "has no usable name")
        if max(lengths) > _NAME_BYTES or sum(lengths) > _PATH_BYTES or len(parts) > _DEPTH:
            raise self.refuse(name, "has too long a path")
        return self.folder.joinpath(*parts)

    def count(self, name: str) -> None:
        self.members += 1
        if self.members > _MEMBERS:
            raise self.refuse(name, f"is one of more than {_MEMBERS:,} members")

    def directory(self, name: str) -> None:
        if PurePosixPath(name) != PurePosixPath("."):
            self._make(self.place(name), name)

    def file(self, name: str, source: io.BufferedIOBase, declared: int | None = None) -> None:
        target = self.place(name)
        self._make(target.parent, name)
        size = 0
        try:
            with target.open("xb") as out:
                while block := source.read(_BLOCK):
                    size, self.bytes = size + len(block), self.bytes + len(block)
                    if self.bytes > self.limit:
                        raise self.refuse(name, f"takes it beyond {self.limit:,} bytes")
                    if declared is not None and size > declared:
                        raise self.refuse(name, f"is longer than the {declared:,} bytes it declares")
                    out.write(block)
        except FileExistsError:
            raise self.refuse(name, "comes twice") from None
        if declared is not None and size != declared:
            raise self.refuse(name, f"is shorter than the {declared:,} bytes it declares")
        self.files.append(target)

    def _make(self, folder: Path, name: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise self.refuse(name, "is a folder where a file is already") from None


class _Header(tarfile.TarInfo):
    """A tar header; one that would make tarfile read without end, or backwards, is refused before it does."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):  # the mark of the end
                raise
            raise ValueError(str(error)) from None  # tarfile would take a damaged header for the end, too
        extended = info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if info.size < 0 or (info.size > _HEADER_BYTES and (extended or info.type in b"LK")):
            raise ValueError(f"a header declares {info.size:,} bytes")
        return info


class _Bounded(io.RawIOBase):
    """A stream that ends in an error after `limit` bytes, whatever is read from it and why."""

    def __init__(self, source: io.BufferedIOBase, limit: int) -> None:
        self.source, self.left = source, limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self.source.read(min(size, _BLOCK) if size >= 0 else _BLOCK)
        self.left -= len(block)
        if self.left < 0:
            raise ValueError("it unpacks to more than is allowed")
        return block


def _decompressed(path: Path) -> io.BufferedIOBase:
    suffix = _TAR.get(path.suffix.lower(), path.suffix.lower())
    opened: io.BufferedIOBase = _STREAMS[suffix](path, "rb") if suffix in _STREAMS else path.open("rb")
    return opened


def _untar(path: Path, taken: _Taken, only: Collection[str] | None) -> None:
    with _decompressed(path) as stream:
        # Headers and padding come on top of what is unpacked: at most a few blocks for each member.
        bounded = _Bounded(stream, 2 * taken.limit + (64 << 20) if only is None else default_limit(path) * 2)
        with tarfile.open(fileobj=bounded, mode="r|", tarinfo=_Header) as archive:
            for member in archive:
                taken.count(member.name)
                if only is not None and PurePosixPath(member.name).name not in only:
                    continue
                if member.isdir():
                    taken.directory(member.name)
                elif member.isreg() and not member.issparse():
                    content = archive.extractfile(member)
                    assert isinstance(content, io.BufferedIOBase)
                    taken.file(member.name, content, member.size)
                else:
                    raise taken.refuse(member.name, "is neither a file nor a folder")


def _unzip(path: Path, taken: _Taken, only: Collection[str] | None) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            taken.count(member.filename)
            if only is not None and PurePosixPath(member.filename).name not in only:
                continue
            mode = stat.S_IFMT(member.external_attr >> 16)
            if "\0" in member.orig_filename:
                raise taken.refuse(member.orig_filename, "has no usable name")
            if member.flag_bits & 1:
                raise taken.refuse(member.filename, "is encrypted; unpack it yourself and hand over the folder")
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise taken.refuse(member.filename, "is neither a file nor a folder")
            if member.is_dir():
                taken.directory(member.filename)
            elif taken.bytes + member.file_size > taken.limit:
                raise taken.refuse(member.filename, f"takes it beyond {taken.limit:,} bytes")
            else:
                with archive.open(member) as content:
                    assert isinstance(content, io.BufferedIOBase)
                    taken.file(member.filename, content, member.file_size)
