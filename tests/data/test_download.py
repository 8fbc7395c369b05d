"""Reliability test 11: downloads cut, corrupted or answered oddly end in the right file or a named error."""

import hashlib
import http.server
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from longspan.data.download import Patience, download
from longspan.errors import DataError

CASES = 200 if os.environ.get("LONGSPAN_TORTURE") else 30
QUICK = Patience(timeout=5.0, fruitless=3, pause=0.0)


@dataclass
class Behaviour:
    """What the server has, and what it does to each answer in turn; beyond the list it behaves."""

    content: bytes = b""
    faults: list[tuple[str, float]] = field(default_factory=list)
    etag: str | None = '"one"'
    asked: list[str | None] = field(default_factory=list)


class Handler(http.server.BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        behaviour = self.behaviour
        asked = self.headers.get("Range")
        behaviour.asked.append(asked)
        fault, share = behaviour.faults.pop(0) if behaviour.faults else ("", 0.0)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if fault == "status":
            self.send_error([500, 503, 429, 408][int(share * 4)])
            return
        if asked and (fault == "ignore range" or self.headers.get("If-Range") != behaviour.etag):
            asked, start = None, 0
        if start >= len(behaviour.content) and asked:
            self.send_error(416)
            return
        body = bytearray(behaviour.content[start:])
        if fault == "corrupt" and body:
            body[int(share * len(body))] ^= 0x55
        self.send_response(206 if asked else 200)
        if asked:
            shown = start + (fault == "wrong range")
            self.send_header("Content-Range", f"bytes {shown}-{len(behaviour.content) - 1}/{len(behaviour.content)}")
        if fault == "odd length":
            self.send_header("Content-Length", ["\xb2", "9" * 5000][int(share * 2)])
        elif fault != "no length":
            self.send_header("Content-Length", str(len(body)))
        if behaviour.etag:
            self.send_header("ETag", behaviour.etag)
        self.end_headers()
        whole = int(share * len(body)) if fault in ("drop", "no length") else len(body)
        self.wfile.write(bytes(body[:whole]))
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


def test_the_right_file_or_a_named_error(server: tuple[str, Behaviour], tmp_path: Path) -> None:
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
            assert download(url, target, digest, patience=QUICK) == target
        except DataError as error:
            said = str(error)
        else:
            said = ""
        outcomes.add(bool(said))
        if said:
            assert "\n" not in said
            assert not target.exists()
            assert "SHA-256" not in said or list(target.parent.iterdir()) == []
            behaviour.faults = []
            download(url, target, digest, patience=QUICK)
        assert target.read_bytes() == behaviour.content
        assert list(target.parent.iterdir()) == [target]
    assert outcomes == {True, False}


def test_a_cut_download_goes_on_where_it_was(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.content = bytes(range(256)) * 100
    behaviour.faults = [("drop", 0.5), ("status", 0.0), ("status", 0.0), ("status", 0.0)]
    target = tmp_path / "text.bin"
    with pytest.raises(DataError, match="12,800 bytes are kept, and the same command goes on from there"):
        download(url, target, patience=QUICK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.bin.part", "text.bin.part.json"]
    heard: list[tuple[int, int | None]] = []
    download(url, target, progress=lambda done, total: heard.append((done, total)), patience=QUICK)
    assert behaviour.asked[-1] == "bytes=12800-"
    assert heard[-1] == (25_600, 25_600)
    assert target.read_bytes() == behaviour.content


def test_a_file_that_changed_on_the_server_is_fetched_anew(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.content = b"old" * 1000
    behaviour.faults = [("drop", 0.5), *[("status", 0.0)] * 3]
    target = tmp_path / "text.bin"
    with pytest.raises(DataError):
        download(url, target, patience=QUICK)
    behaviour.content, behaviour.etag = b"new" * 1000, '"two"'
    assert download(url, target, patience=QUICK).read_bytes() == behaviour.content


def test_a_wrong_checksum_leaves_nothing(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.content = b"text"
    with pytest.raises(DataError, match=r"came with SHA-256 982d.*, not 0000"):
        download(url, tmp_path / "text.bin", "0" * 64, patience=QUICK)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["", "no length"])
def test_more_than_the_limit_leaves_nothing(fault: str, server: tuple[str, Behaviour], tmp_path: Path) -> None:
    """Declared or not, and on the way on from a part; asked for once, since no other attempt gives less."""
    url, behaviour = server
    behaviour.content = b"text" * 50_000
    behaviour.faults = [(fault, 1.0)]
    heard: list[int] = []
    with pytest.raises(DataError, match="199,999"):
        download(url, tmp_path / "text.bin", None, lambda done, _: heard.append(done), QUICK, limit=199_999)
    assert len(behaviour.asked) == 1
    assert bool(heard) == bool(fault)  # what declares too much is not read at all
    assert list(tmp_path.iterdir()) == []
    behaviour.faults = [("drop", 0.5)]
    with pytest.raises(DataError, match="199,999"):
        download(url, tmp_path / "text.bin", patience=QUICK, limit=199_999)
    assert list(tmp_path.iterdir()) == []
    behaviour.faults = [("drop", 0.5), (fault, 1.0)]
    assert download(url, tmp_path / "text.bin", patience=QUICK, limit=200_000).read_bytes() == behaviour.content


def test_what_cannot_be_fetched_is_named(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, _ = server
    port = url.split(":")[2].split("/")[0]
    with pytest.raises(DataError, match="no http or https address"):
        download("file:///etc/passwd", tmp_path / "x", patience=QUICK)
    with pytest.raises(DataError, match="cannot be fetched"):
        download(url.replace(port, "9"), tmp_path / "x", patience=QUICK)
