"""Safe unpacking of untrusted archives and compressed files.

Members are extracted one by one. Only regular files, folders and hard links to files of the same archive are accepted;
a link becomes a copy. Names are checked here, because Python 3.11.7's own tar filter can be bypassed. Files are opened
in exclusive mode, so nothing is overwritten, and the bytes written are counted against a limit.
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
from longspan.tokenizers.text import FULL

_TAR_SUFFIXES = {".tar": "", ".tgz": ".gz", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz", ".tzst": ".zst"}


_BLOCK_BYTES = 1 << 20


class _ZstandardReader(io.RawIOBase):
    """Decompresses all frames of a file; one that ends early is an error, unlike with the reader of the library."""

    def __init__(self, file: io.BufferedReader, library: Any) -> None:
        self.file = file
        self.new, self.error = library.ZstdDecompressor().decompressobj, library.ZstdError
        self.frame: Any = self.new()
        self.data = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self.data:
            packed = self.frame.unused_data if self.frame.eof else b""
            packed = packed or self.file.read(_BLOCK_BYTES)
            if not packed:
                if not self.frame.eof:
                    raise EOFError("the last frame is incomplete")
                return 0
            try:
                self.frame = self.new() if self.frame.eof else self.frame
                self.data = self.frame.decompress(packed)
            except self.error as error:
                raise OSError(str(error)) from None
        size = min(len(buffer), len(self.data))
        buffer[:size], self.data = self.data[:size], self.data[size:]
        return size


def _open_zstandard(path: Path, _: str) -> io.BufferedReader:
    # Not in the reader: since Python 3.13 a stream whose __init__ failed prints a traceback when it is deleted.
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path} needs zstandard; install it with: pip install 'longspan[zstd]'") from None
    return io.BufferedReader(_ZstandardReader(path.open("rb"), zstandard), _BLOCK_BYTES)


_STREAM_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstandard}
_MAX_MEMBERS = 100_000
_MAX_HEADER_BYTES = 1 << 16
_MAX_NAME_BYTES, _MAX_PATH_BYTES, _MAX_DEPTH = 255, 1000, 32
_UNPACK_ERRORS = (
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


def archive_kind(path: Path) -> Literal["tar", "zip", "stream"] | None:
    """The kind of archive by file name: `tar` or `zip`, `stream` for one compressed file, None for plain text."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    last = suffixes[-1] if suffixes else ""
    if last in _TAR_SUFFIXES or (last in _STREAM_OPENERS and suffixes[0] == ".tar"):
        return "tar"
    return "zip" if last == ".zip" else "stream" if last in _STREAM_OPENERS else None


def default_limit(path: Path) -> int:
    """The most bytes an archive may unpack to: far above the ratio of compressed text, far below a zip bomb."""
    return max(1 << 30, 200 * path.stat().st_size)


def unpack(
    path: Path,
    folder: Path,
    limit: int | None = None,
    only: Collection[str] | None = None,
    shown: str | None = None,
) -> list[Path]:
    """Unpack `path` into the empty `folder` and return the files. With `only`, other base names are skipped.

    Errors call the archive `shown`.

    A full disk is an OSError. After an error, `folder` contains the files unpacked so far; the caller removes them.
    """
    shown = shown or str(path)
    try:
        allowed = default_limit(path) if limit is None else limit
        extractor = _Extractor(shown, folder, allowed)
        kind = archive_kind(path)
        if kind == "tar":
            _untar(path, extractor, only)
        elif kind == "zip":
            _unzip(path, extractor, only)
        else:
            with _decompressed(path) as stream:
                extractor.file(path.stem, stream)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file {shown}; check the name") from None
    except _UNPACK_ERRORS as error:
        if isinstance(error, OSError) and error.errno in FULL:
            raise  # the archive is not to blame
        raise DataError(
            f"{shown} cannot be unpacked: {error or type(error).__name__}; the file is damaged or incomplete, "
            "so copy or download it again"
        ) from None
    return extractor.files


class _Extractor:
    """Writes the members of one archive below a folder and enforces the rules of this module."""

    def __init__(self, archive: str, folder: Path, limit: int) -> None:
        self.archive, self.folder, self.limit = archive, folder, limit
        self.files: list[Path] = []
        self.members = self.bytes = 0

    def error(self, name: str, problem: str) -> DataError:
        fix = "if you trust it, unpack it yourself and use the folder"
        return DataError(f"{self.archive} was not unpacked: its member {name[:80]!r} {problem}; {fix}")

    def target(self, name: str) -> Path:
        """The path a member is written to. Names that point outside the folder, or to no file, are errors."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\\" in name or (parts and ":" in parts[0]):
            raise self.error(name, "has a path outside the folder")
        try:
            lengths = [len(part.encode("utf-8")) for part in parts]
        except UnicodeEncodeError:
            raise self.error(name, "has a name that is not UTF-8") from None
        if not parts or "\0" in name:
            raise self.error(name, "has no usable name")
        if max(lengths) > _MAX_NAME_BYTES or sum(lengths) > _MAX_PATH_BYTES or len(parts) > _MAX_DEPTH:
            raise self.error(name, "has a path that is too long")
        return self.folder.joinpath(*parts)

    def count(self, name: str) -> None:
        self.members += 1
        if self.members > _MAX_MEMBERS:
            raise self.error(name, f"is one of more than {_MAX_MEMBERS:,} members")

    def directory(self, name: str) -> None:
        if PurePosixPath(name) != PurePosixPath("."):
            self._make_folder(self.target(name), name)

    def file(self, name: str, source: io.BufferedIOBase, declared: int | None = None) -> None:
        target = self.target(name)
        self._make_folder(target.parent, name)
        size = 0
        try:
            with target.open("xb") as out:
                while block := source.read(_BLOCK_BYTES):
                    size, self.bytes = size + len(block), self.bytes + len(block)
                    if self.bytes > self.limit:
                        raise self.error(name, f"exceeds the limit of {self.limit:,} bytes")
                    if declared is not None and size > declared:
                        raise self.error(name, f"is longer than the {declared:,} bytes it declares")
                    out.write(block)
        except FileExistsError:
            raise self.error(name, "occurs twice") from None
        if declared is not None and size != declared:
            raise self.error(name, f"is shorter than the {declared:,} bytes it declares")
        self.files.append(target)

    def hard_link(self, name: str, other: str) -> None:
        """A copy of a file that was unpacked before. `tar` writes a file that it is given twice as a link to itself."""
        source = self.target(other)
        if source not in self.files:
            raise self.error(name, f"is a link to {other[:80]!r}, which is not a file before it in the archive")
        if self.target(name) != source:
            with source.open("rb") as content:
                self.file(name, content)

    def _make_folder(self, folder: Path, name: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise self.error(name, "needs a folder where the archive has a file") from None


class _CheckedHeader(tarfile.TarInfo):
    """A tar header whose size is checked, because tarfile would read without end, or backwards, for a forged one.

    `frombuf` is the wrong place for a check: newer releases of Python parse headers without calling it.
    """

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_CheckedHeader":
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros ends the archive
            raise
        except tarfile.HeaderError as error:
            raise ValueError(str(error)) from None  # tarfile would treat a damaged header as the end

    def _proc_member(self, archive: tarfile.TarFile) -> "_CheckedHeader":
        """Runs before anything of the member is read. A subclass may override it, says tarfile."""
        extended = self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.size < 0 or (self.size > _MAX_HEADER_BYTES and (extended or self.type in b"LK")):
            raise ValueError(f"a header declares {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


class _LimitedReader(io.RawIOBase):
    """A stream that raises ValueError after `limit` bytes, including headers and skipped members."""

    def __init__(self, source: io.BufferedIOBase, limit: int) -> None:
        self.source, self.left = source, limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self.source.read(min(size, _BLOCK_BYTES) if size >= 0 else _BLOCK_BYTES)
        self.left -= len(block)
        if self.left < 0:
            raise ValueError("it unpacks to more bytes than allowed")
        return block


def _decompressed(path: Path) -> io.BufferedIOBase:
    suffix = _TAR_SUFFIXES.get(path.suffix.lower(), path.suffix.lower())
    opened: io.BufferedIOBase = _STREAM_OPENERS[suffix](path, "rb") if suffix in _STREAM_OPENERS else path.open("rb")
    return opened


def _untar(path: Path, extractor: _Extractor, only: Collection[str] | None) -> None:
    with _decompressed(path) as stream:
        # Headers and padding are extra: at most a few blocks per member.
        limited = _LimitedReader(stream, 2 * extractor.limit + (64 << 20) if only is None else default_limit(path) * 2)
        with tarfile.open(fileobj=limited, mode="r|", tarinfo=_CheckedHeader) as archive:
            for member in archive:
                extractor.count(member.name)
                if only is not None and PurePosixPath(member.name).name not in only:
                    continue
                if member.isdir():
                    extractor.directory(member.name)
                elif member.isreg() and not member.issparse():
                    content = archive.extractfile(member)
                    assert isinstance(content, io.BufferedIOBase)
                    extractor.file(member.name, content, member.size)
                elif member.islnk():
                    extractor.hard_link(member.name, member.linkname)
                else:
                    raise extractor.error(member.name, "is neither a file nor a folder")


def _unzip(path: Path, extractor: _Extractor, only: Collection[str] | None) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            extractor.count(member.filename)
            if only is not None and PurePosixPath(member.filename).name not in only:
                continue
            mode = stat.S_IFMT(member.external_attr >> 16)
            if "\0" in member.orig_filename:
                raise extractor.error(member.orig_filename, "has no usable name")
            if member.flag_bits & 1:
                raise extractor.error(member.filename, "is encrypted")
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise extractor.error(member.filename, "is neither a file nor a folder")
            if member.is_dir():
                extractor.directory(member.filename)
            elif extractor.bytes + member.file_size > extractor.limit:
                raise extractor.error(member.filename, f"exceeds the limit of {extractor.limit:,} bytes")
            else:
                with archive.open(member) as content:
                    assert isinstance(content, io.BufferedIOBase)
                    extractor.file(member.filename, content, member.file_size)
