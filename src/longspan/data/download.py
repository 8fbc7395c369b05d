"""Resumable downloads: a partial file is kept and continued, and a file with a wrong checksum is removed."""

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

from longspan.data.cache import not_written, read_json, sha256, sync, write_json
from longspan.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far and the total, or None if the server does not give it."""

_BLOCK_BYTES = 1 << 16
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Retry:
    """When to retry and when to give up.

    A download fails after `failures` consecutive attempts without a new byte, or after `attempts` in all. `timeout`
    and `pause` are in seconds; the pause doubles with every failure, up to 30.
    """

    timeout: float = 30.0
    failures: int = 5
    attempts: int = 100
    pause: float = 1.0


def download(
    url: str,
    target: Path,
    sha256_hex: str | None = None,
    progress: Progress | None = None,
    retry: Retry | None = None,
    *,
    limit: int | None = None,
) -> Path:
    """Download `url` to the file `target`, resuming an interrupted download.

    Bytes received so far are in `target.part`, with the server's ETag or date in `target.part.json`. If the connection
    ends early, the rest is requested. After a wrong checksum, or more than `limit` bytes, nothing is kept.
    """
    retry = retry or Retry()
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(
            f"{url} is not an http or https URL; to install a local file, use longspan data get --from FILE"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _PartialFile(target)
    failures = 0
    for attempt in range(retry.attempts):
        before = part.size
        try:
            if _request(url, part, progress, retry.timeout, limit):
                return _finish(part, url, sha256_hex)
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise DataError(
                    f"{url} cannot be downloaded: the server answered {error.code} {error.reason}; if you have the "
                    "file, use longspan data get --from FILE"
                ) from None
            reason = f"the server answered {error.code} {error.reason}"
        except _CONNECTION_ERRORS as error:
            # A full disk is an OSError too, and a retry does not help.
            if isinstance(error, OSError) and error.filename == str(part.path):
                raise not_written(part.path, error) from None
            reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        failures = 0 if part.size > before else failures + 1
        if failures >= retry.failures:
            break
        time.sleep(min(retry.pause * 2**failures, 30.0) if attempt else 0.0)
    raise DataError(
        f"{url} cannot be downloaded: {reason}; {part.size:,} bytes are kept, so run the same command again to resume"
    )


class _PartialFile:
    """The first bytes of a file, and the HTTP validator (ETag or date) of its version on the server."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self.notes = target.with_name(f"{target.name}.part.json")
        notes = read_json(self.notes)
        self.validator = notes.get("mark") if isinstance(notes, dict) else None
        # Without a validator the server may have another file by now, so start from the beginning.
        if not isinstance(self.validator, str):
            self.validator = None
            self.remove()

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def restart(self, validator: str | None) -> None:
        self.remove()
        self.validator = validator
        if validator:
            write_json(self.notes, {"mark": validator})

    def append(self, block: bytes) -> None:
        try:
            with self.path.open("ab") as out:
                out.write(block)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.notes.unlink(missing_ok=True)


def _request(url: str, part: _PartialFile, progress: Progress | None, timeout: float, limit: int | None) -> bool:
    """Request the missing bytes and append what arrives. True if the file is complete."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", "User-Agent": "longspan"})
    have = part.size
    if have and part.validator:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", part.validator)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            total = _total_size(response, have)
            _check_limit(url, part, total or 0, limit)
            if response.status != 206:
                part.restart(response.headers.get("ETag") or response.headers.get("Last-Modified"))
                have = 0
            while block := response.read(_BLOCK_BYTES):
                have += len(block)
                _check_limit(url, part, have, limit)
                part.append(block)
                if progress:
                    progress(have, total)
            if total is not None and have > total:
                part.restart(None)
                return False
            return total is None or have == total
    except urllib.error.HTTPError as error:
        with contextlib.closing(error):
            if error.code == 416:  # range not satisfiable: the partial file is not a prefix of the server's file
                part.restart(None)
                return False
            raise


def _check_limit(url: str, part: _PartialFile, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        part.remove()
        raise DataError(
            f"{url} has at least {size:,} bytes, more than the limit of {limit:,}; the download was deleted, "
            "so check the URL"
        )


def _total_size(response: Any, have: int) -> int | None:
    """The size of the complete file according to the server. Another range than the requested one is an error."""
    if response.status == 206:
        given = str(response.headers.get("Content-Range", ""))
        span, _, total = given.removeprefix("bytes ").partition("/")
        if span.partition("-")[0] != str(have) or not _is_size(total):
            raise http.client.HTTPException(f"the server sent the range {given!r}, not the one that starts at {have}")
        return int(total)
    length = response.headers.get("Content-Length", "")
    return int(length) if _is_size(length) else None


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) < 19  # int() rejects more than 4,300 digits, and no file has 10^18 bytes


def _finish(part: _PartialFile, url: str, sha256_hex: str | None) -> Path:
    if not part.path.exists():
        raise DataError(f"{url} is empty; if you have the file, use longspan data get --from FILE")
    if sha256_hex is not None and (found := sha256(part.path)) != sha256_hex:
        part.remove()
        raise DataError(f"{url} has SHA-256 {found}, not {sha256_hex}; the download was deleted, so try again")
    sync(part.path)
    part.path.replace(part.target)
    part.remove()
    sync(part.target.parent)
    return part.target
