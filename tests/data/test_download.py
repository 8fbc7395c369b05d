"""Reliability test 11: interrupted, corrupted and odd downloads end in the right file or in a DataError."""

import hashlib
import http.server
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from longspan.data.download import Retry, download
from longspan.errors import DataError

CASES = 200 if os.environ.get("LONGSPAN_TORTURE") else 30
QUICK = Retry(timeout=5.0, failures=3, pause=0.0)


@dataclass
class Behaviour:
    """The server's file, and a fault for each response in turn; later responses are correct."""

    content: bytes = b""
    faults: list[tuple[str, float]] = field(default_factory=list)
    etag: str | None = '"one"'
    ranges: list[str | None] = field(default_factory=list)


class Handler(http.server.BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        behaviour = self.behaviour
        range_header = self.headers.get("Range")
        behaviour.ranges.append(range_header)
        fault, share = behaviour.faults.pop(0) if behaviour.faults else ("", 0.0)
        start = int(range_header.removeprefix("bytes=").rstrip("-")) if range_header else 0
        if fault == "status":
            self.send_error([500, 503, 429, 408][int(share * 4)])
            return
        if range_header and (fault == "ignore range" or self.headers.get("If-Range") != behaviour.etag):
            range_header, start = None, 0
        if start >= len(behaviour.content) and range_header:
            self.send_error(416)
            return
        body = bytearray(behaviour.content[start:])
        if fault == "corrupt" and body:
            body[int(share * len(body))] ^= 0x55
        self.send_response(206 if range_header else 200)
        if range_header:
            first = start + (fault == "wrong range")
            self.send_header("Content-Range", f"bytes {first}-{len(behaviour.content) - 1}/{len(behaviour.content)}")
        if fault == "odd length":
            self.send_header("Content-Length", ["\xb2", "9" * 5000][int(share * 2)])
        elif fault != "no length":
            self.send_header("Content-Length", str(len(body)))
        if behaviour.etag:
            self.send_header("ETag", behaviour.etag)
        self.end_headers()
        sent = int(share * len(body)) if fault in ("drop", "no length") else len(body)
        self.wfile.write(bytes(body[:sent]))
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[tuple[str, Behaviour]]:
    behaviour = Behaviour()
    handler = type("Bound", (Handler,), {"behaviour": behaviour})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/text.bin", behaviour
        running.shutdown()
        thread.join()


def test_the_right_file_or_a_data_error(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    generator = random.Random(0)
    kinds = ["drop", "drop", "status", "ignore range", "wrong range", "corrupt", "no length", "odd length"]
    outcomes = set()
    for case in range(CASES):
        behaviour.content = generator.randbytes(generator.choice([1, 1000, 200_000]))
        behaviour.etag = generator.choice(['"one"', '"one"', None])
        behaviour.faults = [(generator.choice(kinds), generator.random()) for _ in range(generator.randrange(6))]
        target = tmp_path / f"{case}" / "text.bin"
        digest = hashlib.sha256(behaviour.content).hexdigest()
        try:
            assert download(url, target, digest, retry=QUICK) == target
        except DataError as error:
            message = str(error)
        else:
            message = ""
        outcomes.add(bool(message))
        if message:
            assert "\n" not in message
            assert not target.exists()
            assert "SHA-256" not in message or list(target.parent.iterdir()) == []
            behaviour.faults = []
            download(url, target, digest, retry=QUICK)
        assert target.read_bytes() == behaviour.content
        assert list(target.parent.iterdir()) == [target]
    assert outcomes == {True, False}


def test_an_interrupted_download_is_resumed(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.content = bytes(range(256)) * 100
    behaviour.faults = [("drop", 0.5), ("status", 0.0), ("status", 0.0), ("status", 0.0)]
    target = tmp_path / "text.bin"
    with pytest.raises(DataError, match="12,800 bytes"):
        download(url, target, retry=QUICK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.bin.part", "text.bin.part.json"]
    reports: list[tuple[int, int | None]] = []
    download(url, target, progress=lambda done, total: reports.append((done, total)), retry=QUICK)
    assert behaviour.ranges[-1] == "bytes=12800-"
    assert reports[-1] == (25_600, 25_600)
    assert target.read_bytes() == behaviour.content


def test_a_file_that_changed_on_the_server_is_downloaded_again(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.content = b"old" * 1000
    behaviour.faults = [("drop", 0.5), *[("status", 0.0)] * 3]
    target = tmp_path / "text.bin"
    with pytest.raises(DataError):
        download(url, target, retry=QUICK)
    behaviour.content, behaviour.etag = b"new" * 1000, '"two"'
    assert download(url, target, retry=QUICK).read_bytes() == behaviour.content


def test_a_wrong_checksum_leaves_nothing(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.content = b"text"
    with pytest.raises(DataError, match=r"982d.*0000"):
        download(url, tmp_path / "text.bin", "0" * 64, retry=QUICK)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["", "no length"])
def test_more_than_the_limit_leaves_nothing(fault: str, server: tuple[str, Behaviour], tmp_path: Path) -> None:
    """With and without a declared length, and when resumed. There is no retry, because it would not help."""
    url, behaviour = server
    behaviour.content = b"text" * 50_000
    behaviour.faults = [(fault, 1.0)]
    reports: list[int] = []
    with pytest.raises(DataError, match="199,999"):
        download(url, tmp_path / "text.bin", None, lambda done, _: reports.append(done), QUICK, limit=199_999)
    assert len(behaviour.ranges) == 1
    assert bool(reports) == bool(fault)  # a response that declares too many bytes is not read
    assert list(tmp_path.iterdir()) == []
    behaviour.faults = [("drop", 0.5)]
    with pytest.raises(DataError, match="199,999"):
        download(url, tmp_path / "text.bin", retry=QUICK, limit=199_999)
    assert list(tmp_path.iterdir()) == []
    behaviour.faults = [("drop", 0.5), (fault, 1.0)]
    assert download(url, tmp_path / "text.bin", retry=QUICK, limit=200_000).read_bytes() == behaviour.content


def test_a_url_that_cannot_be_fetched_is_named(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, _ = server
    port = url.split(":")[2].split("/")[0]
    with pytest.raises(DataError, match=r"file:///etc/passwd.*--from"):
        download("file:///etc/passwd", tmp_path / "x", retry=QUICK)
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/text\.bin"):
        download(url.replace(port, "9"), tmp_path / "x", retry=QUICK)
