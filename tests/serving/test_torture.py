"""The long forms: many sessions, clients that leave, overload. Each runs in a short form in the suite."""

import asyncio
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from longspan.serving.app import create_app
from longspan.serving.settings import Settings
from longspan.text_model import TextModel
from tests.serving.conftest import BASE
from tests.serving.test_sessions import create, leave_early, post, table, turn
from tests.type_checker import unchecked

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))


@pytest.fixture
def busy(text: TextModel, tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(width=8, rows=24, queue=200, state_folder=tmp_path, max_sessions=300, max_tokens=1000)
    # The checks of annotations need a little more memory with every call.
    with unchecked(), TestClient(create_app({"tiny": text}, settings), base_url=BASE) as made:
        yield made


def script(number: int, turns: int) -> list[dict[str, Any]]:
    source = random.Random(number)
    return [
        {
            "prompt": "".join(chr(source.randrange(97, 123)) for _ in range(source.choice([0, 1, 5, 30]))),
            "max_tokens": source.randrange(1, 12),
            "temperature": source.choice([0, 0.7, 1.2]),
        }
        for _ in range(turns)
    ]


def test_many_sessions_with_save_restore_and_cancel(busy: TestClient) -> None:
    """Sessions run at the same time. Between turns they are saved, restored after a turn that is thrown away, moved to
    disk, and left in mid-stream. Every output equals that of the same session alone."""
    sessions, turns = (64, 50) if TORTURE else (4, 3)

    def run(number: int, *, disturbed: bool) -> list[str]:
        name, source, found = create(busy, prompt=f"session {number}", seed=number), random.Random(-number), []
        for body in script(number, turns):
            if disturbed and source.random() < 0.3:
                post(busy, f"/v1/sessions/{name}/save")
                turn(busy, name, prompt="thrown away")
                post(busy, f"/v1/sessions/{name}/restore")
            if disturbed and source.random() < 0.2:
                gone = {"prompt": "gone", "max_tokens": 500, "stream": True}
                leave_early(busy, f"/v1/sessions/{name}/continue", gone, after=3)
            if disturbed and source.random() < 0.2:
                assert busy.portal is not None
                busy.portal.call(table(busy).spill, table(busy).find(name))
            found.append(turn(busy, name, **body))
        busy.delete(f"/v1/sessions/{name}")
        return found

    alone = [run(number, disturbed=False) for number in range(sessions)]
    with ThreadPoolExecutor(min(sessions, 24)) as pool:
        together = list(pool.map(lambda number: run(number, disturbed=True), range(sessions)))
    assert together == alone
    assert not table(busy).table
    assert table(busy).state_bytes == 0


def test_clients_that_leave(busy: TestClient) -> None:
    """In the queue, in the prompt and in the stream: everything is released, and the memory stays flat."""
    engine = busy.app.state.server.models.find(None).engine  # type: ignore[attr-defined]
    source, sizes = random.Random(2), []
    for number in range(1000 if TORTURE else 10):
        body = {
            "prompt": "x" * source.choice([1, 40, 200]),
            "max_tokens": 1000,
            "stream": True,
            "n": source.choice([1, 3]),
        }
        leave_early(busy, "/v1/completions", body, after=source.choice([1, 2, 5]))
        if number % 100 == 50:
            gc.collect()
            sizes.append(resident())
    deadline = time.monotonic() + 10
    while not engine.idle():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not engine.running
    assert all(not batch.active for batch in engine.batches)
    if TORTURE:
        assert max(sizes[2:]) < 1.05 * sizes[1]


@pytest.mark.torture
def test_memory_stays_flat(busy: TestClient) -> None:
    """64 sessions continue for LONGSPAN_SOAK minutes (default 1; 30 for a release). After the first fifth the resident
    memory stays within 5%, and no session sees the text of another: each knows one letter only. LONGSPAN_SOAK_PAUSE is
    the number of seconds between two turns of a session, for a machine with other work."""
    minutes, pause = (float(os.environ.get(f"LONGSPAN_SOAK{name}", value)) for name, value in (("", 1), ("_PAUSE", 0)))
    began, sizes, turns = time.monotonic(), [], [0] * 64
    end = began + 60 * minutes

    def run(number: int) -> None:
        token, name = 97 + number % 26, create(busy, prompt="abc", seed=number)
        while time.monotonic() < end:
            text = turn(busy, name, max_tokens=20, logit_bias={str(token): 100.0})
            assert set(text) == {chr(token)}
            turns[number] += 1
            time.sleep(pause)
            if number == 0 and time.monotonic() > began + 12 * minutes:
                sizes.append(resident())

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(run, range(64)))
    print(f"{sum(turns)} turns, {len(sizes)} sizes from {min(sizes) >> 10} to {max(sizes) >> 10} KiB")
    assert len(sizes) > 5
    assert max(sizes) < 1.05 * min(sizes)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_overload_is_refused_quickly(text: TextModel) -> None:
    """Ten times as many requests as fit: those that do not are refused at once with Retry-After, and /health is good.
    Then the decode loop dies: running and new requests get an error, and /health says so."""
    settings = Settings(width=2, rows=2, queue=4, max_tokens=10_000)
    app = create_app({"tiny": text}, settings)
    count = 2000 if TORTURE else 60
    refused: list[float] = []

    async def many() -> None:
        statuses = await asyncio.gather(*(one() for _ in range(count)))
        assert statuses.count(200) + statuses.count(429) == count
        assert 0 < statuses.count(429) < count

    async def one() -> int:
        began = time.perf_counter()
        status, headers = await ask(app, "/v1/completions", b'{"prompt": "a", "max_tokens": 20}')
        if status == 429:
            refused.append(time.perf_counter() - began)
            assert headers[b"retry-after"] == b"1"
        return status

    with TestClient(app, base_url=BASE) as client:
        assert client.portal is not None
        client.portal.call(many)
        assert client.get("/health").status_code == 200
        engine = app.state.server.models.find(None).engine
        threading.excepthook, before = lambda _: None, threading.excepthook
        engine._launch = None
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
        engine._thread.join(5)
        threading.excepthook = before
        assert client.get("/health").status_code == 503
        again = client.post("/v1/completions", json={"prompt": "a"})
        assert (again.status_code, again.json()["error"]["code"]) == (503, "unavailable")
    assert sorted(refused)[len(refused) // 2] < 0.05 or not TORTURE


async def ask(app: Any, path: str, body: bytes) -> tuple[int, dict[bytes, bytes]]:
    """One request without a client in between."""
    first: dict[str, Any] = {}
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.sleep(3600)
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        first.update(message if not first else {})

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    await app(scope | {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"}, receive, send)
    return first["status"], dict(first["headers"])
