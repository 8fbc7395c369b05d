"""Downloads that resume: what has come is kept until it is whole, and is what was promised or is not kept."""

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longspan.data.cache import read_json, sha256, sync, write_json
from longspan.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with the bytes that have come and the bytes there will be, where that is known."""

_BLOCK = 1 << 16
_LOST = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server, and how often to come back when it breaks off."""

    timeout: float = 30.0
    fruitless: int = 5
    attempts: int = 100
    pause: float = 1.0


def download(
    url: str,
    target: Path,
    sha256_hex: str | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
    *,
    limit: int | None = None,
) -> Path:
    """`url` as the file `target`, gone on with where an earlier call was cut off.

    What has come so far waits in `target.part`, with the server's mark of its version beside it. A server that breaks
    off is asked for the rest. A wrong checksum, or more than `limit` bytes, leaves nothing behind.
    """
    patience = patience or Patience()
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url} is no http or https address; hand over a file with --from FILE")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _Part(target)
    fruitless = 0
    for attempt in range(patience.attempts):
        before = part.size
        try:
            if _ask(url, part, progress, patience.timeout, limit):
                return _finished(part, url, sha256_hex)
            reason = "the server broke off"
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise DataError(f"{url} cannot be fetched: the server answered {error.code} {error.reason}") from None
            reason = f"the server answered {error.code} {error.reason}"
        except _LOST as error:
            # A full disk is an OSError too, and no other attempt mends it.
            if isinstance(error, OSError) and error.filename == str(part.path):
                raise DataError(f"{part.path} cannot be written: {error.strerror}") from None
            reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        fruitless = 0 if part.size > before else fruitless + 1
        if fruitless >= patience.fruitless:
            break
        time.sleep(min(patience.pause * 2**fruitless, 30.0) if attempt else 0.0)
    raise DataError(
        f"{url} cannot be fetched: {reason}; {part.size:,} bytes are kept, and the same command goes on from there"
    )


class _Part:
    """The beginning of a file, and the mark (ETag or date) of the version it is the beginning of."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self.notes = target.with_name(f"{target.name}.part.json")
        notes = read_json(self.notes)
        self.mark = notes.get("mark") if isinstance(notes, dict) else None
        # Without a mark there is no telling whether the server still has the same file: begin anew.
        if not isinstance(self.mark, str):
            self.mark = None
            self.remove()

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def begin(self, mark: str | None) -> None:
        self.remove()
        self.mark = mark
        if mark:
            write_json(self.notes, {"mark": mark})

    def append(self, block: bytes) -> None:
        try:
            with self.path.open("ab") as out:
                out.write(block)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.notes.unlink(missing_ok=True)


def _ask(url: str, part: _Part, progress: Progress | None, timeout: float, limit: int | None) -> bool:
    """Asks for what is missing and takes what comes; whether the file is whole now."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", "User-Agent": "longspan"})
    have = part.size
    if have and part.mark:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", part.mark)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            total = _total(answer, have)
            _check_limit(url, part, total or 0, limit)
            if answer.status != 206:
                part.begin(answer.headers.get("ETag") or answer.headers.get("Last-Modified"))
                have = 0
            while block := answer.read(_BLOCK):
                have += len(block)
                _check_limit(url, part, have, limit)
                part.append(block)
                if progress:
                    progress(have, total)
            if total is not None and have > total:
                part.begin(None)
                return False
            return total is None or have == total
    except urllib.error.HTTPError as error:
        with contextlib.closing(error):
            if error.code == 416:  # what we have is not the beginning of what the server has
                part.begin(None)
                return False
            raise


def _check_limit(url: str, part: _Part, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        part.remove()
        raise DataError(f"{url} has at least {size:,} bytes, more than the {limit:,} it may have; nothing is kept")


def _total(answer: Any, have: int) -> int | None:
    """The length of the whole file as the server gives it; a range other than the one asked for is refused."""
    if answer.status == 206:
        given = str(answer.headers.get("Content-Range", ""))
        span, _, total = given.removeprefix("bytes ").partition("/")
        if span.partition("-")[0] != str(have) or not _is_size(total):
            raise http.client.HTTPException(f"the server sent the range {given!r}, not the one from {have} on")
        return int(total)
    length = answer.headers.get("Content-Length", "")
    return int(length) if _is_size(length) else None


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) < 19  # int() refuses more than 4,300 digits, and no file has 10^18 bytes


def _finished(part: _Part, url: str, sha256_hex: str | None) -> Path:
    if not part.path.exists():
        raise DataError(f"{url} is empty")
    if sha256_hex is not None and (found := sha256(part.path)) != sha256_hex:
        part.remove()
        raise DataError(f"{url} came with SHA-256 {found}, not {sha256_hex}; nothing is kept, try again")
    sync(part.path)
    part.path.replace(part.target)
    part.remove()
    sync(part.target.parent)
    return part.target
