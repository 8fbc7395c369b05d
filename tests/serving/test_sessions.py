"""Sessions: turns, forks, files, names and limits."""

import json
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from longspan.serving.app import create_app
from longspan.serving.settings import Settings
from longspan.serving.store import Store, new_name
from longspan.text_model import TextModel
from tests.serving.conftest import BASE, tiny

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))


def post(client: TestClient, path: str, body: Any = None, status: int = 200) -> dict[str, Any]:
    answer = client.post(path, json={} if body is None else body)
    assert answer.status_code == status, answer.text
    return answer.json()


def create(client: TestClient, **body: Any) -> str:
    return post(client, "/v1/sessions", body, 201)["id"]


def turn(client: TestClient, name: str, **body: Any) -> str:
    return post(client, f"/v1/sessions/{name}/continue", {"max_tokens": 9, **body})["choices"][0]["text"]


def table(client: TestClient) -> Any:
    return client.app.state.server.sessions  # type: ignore[attr-defined]


def test_turns_equal_one_long_turn(client: TestClient) -> None:
    whole = turn(client, create(client, prompt="once", seed=4), max_tokens=27)
    name = create(client, prompt="once", seed=4)
    assert "".join(turn(client, name) for _ in range(3)) == whole
    later = create(client, seed=4)
    assert turn(client, later, prompt="once", max_tokens=27) == whole


def test_a_restored_session_produces_the_same_bytes(client: TestClient) -> None:
    name = create(client, prompt="once upon", seed=1)
    turn(client, name)
    saved = post(client, f"/v1/sessions/{name}/save")
    assert saved["saved"]
    first = [turn(client, name, prompt=" and"), turn(client, name, temperature=0.5)]
    restored = post(client, f"/v1/sessions/{name}/restore")
    assert restored["tokens"] == saved["tokens"]
    assert [turn(client, name, prompt=" and"), turn(client, name, temperature=0.5)] == first


def test_forks_and_seeds(client: TestClient) -> None:
    name = create(client, prompt="once", seed=8)
    turn(client, name)
    same = post(client, f"/v1/sessions/{name}/fork", {}, 201)["id"]
    other = post(client, f"/v1/sessions/{name}/fork", {"seed": 99}, 201)["id"]
    texts = [turn(client, one, max_tokens=30) for one in (name, same, other)]
    assert texts[0] == texts[1] != texts[2]
    again = post(client, f"/v1/sessions/{name}/fork", {}, 201)["id"]
    assert turn(client, name, seed=5) == turn(client, again, seed=5)


def test_export_and_import(client: TestClient, text: TextModel) -> None:
    """Through a file, into a second server that has the same model among others."""
    name = create(client, prompt="moved", seed=2)
    turn(client, name, max_tokens=40)
    content = client.get(f"/v1/sessions/{name}/state").content
    kind = {"content-type": "application/octet-stream"}
    with TestClient(create_app({"other": tiny(9), "same": text}, Settings(width=4, rows=4)), base_url=BASE) as second:
        moved = second.post("/v1/sessions/import", content=content, headers=kind)
        assert moved.status_code == 201
        assert moved.json()["model"] == "same"
        assert turn(second, moved.json()["id"], max_tokens=30) == turn(client, name, max_tokens=30)
    with TestClient(create_app({"other": tiny(9)}, Settings(width=4, rows=4)), base_url=BASE) as third:
        refused = third.post("/v1/sessions/import", content=content, headers=kind)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_state")


def test_damaged_files_are_refused(client: TestClient) -> None:
    name = create(client, prompt="damaged", seed=2)
    content = client.get(f"/v1/sessions/{name}/state").content
    kind, source = {"content-type": "application/octet-stream"}, random.Random(0)
    before = len(table(client).table)
    for _ in range(400 if TORTURE else 25):
        place, size = source.randrange(len(content)), source.randrange(1, 9)
        damaged = content[:place] + source.randbytes(size) + content[place + size :]
        if damaged != content:
            answer = client.post("/v1/sessions/import", content=damaged, headers=kind)
            assert answer.status_code == 400, place
    for damaged in (b"", b"x", content[:-1], content + b"x"):
        assert client.post("/v1/sessions/import", content=damaged, headers=kind).status_code == 400
    assert len(table(client).table) == before


def test_a_client_that_leaves_changes_nothing(client: TestClient) -> None:
    """The stream breaks off after some tokens: the session is as before, and its next turn has the same bytes."""
    name = create(client, prompt="leaving", seed=3)
    fork = post(client, f"/v1/sessions/{name}/fork", {}, 201)["id"]
    body = {"max_tokens": 300, "stream": True, "prompt": "x"}
    leave_early(client, f"/v1/sessions/{name}/continue", body, after=3)
    found = client.get(f"/v1/sessions/{name}").json()
    assert found["tokens"] == 7
    assert not found["busy"]
    assert turn(client, name) == turn(client, fork)


def leave_early(
    client: TestClient, path: str, body: dict[str, Any], after: int = -1, seen: Callable[[bytes], None] | None = None
) -> None:
    """A client that disconnects after some chunks, or acts on them as they arrive. The test client of starlette does
    neither, so this is the raw ASGI."""
    import anyio

    async def run() -> None:
        sent, gone = 0, anyio.Event()
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal sent
            sent += message["type"] == "http.response.body"
            if seen is not None:
                seen(message.get("body", b""))
            if sent == after:
                gone.set()

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
        scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"}
        await client.app(scope, receive, send)  # type: ignore[arg-type]

    assert client.portal is not None
    client.portal.call(run)


def test_stop_keeps_what_was_generated(client: TestClient) -> None:
    """The turn ends early, and the session continues after what the client has received."""
    name = create(client, prompt="stopping", seed=3)
    fork = post(client, f"/v1/sessions/{name}/fork", {}, 201)["id"]
    received: list[str] = []

    def stop_after_some(sent: bytes) -> None:
        received.append(sent.decode())
        if len(received) == 4:
            table(client).find(name).running.stop_now = "stop"

    leave_early(client, f"/v1/sessions/{name}/continue", {"max_tokens": 300, "stream": True}, seen=stop_after_some)
    chunks = [json.loads(one.removeprefix("data: ")) for one in received if one.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    read = client.get(f"/v1/sessions/{name}").json()["tokens"] - len("stopping")
    assert 1 <= read < 300
    assert turn(client, fork, max_tokens=read, logprobs=0) == text
    assert turn(client, name, temperature=0) == turn(client, fork, temperature=0)


def test_names_reach_no_file(client: TestClient, folder: Path) -> None:
    """Names that are not exactly ours are not found, whatever they contain; nothing is created or removed."""
    real = create(client, prompt="a")
    post(client, f"/v1/sessions/{real}/save")
    source = random.Random(4)
    outside = folder.parent / "outside.saved"
    outside.write_bytes(b"secret")
    parts = [
        "..",
        "/",
        "%2e%2e%2f",
        "%00",
        "\\",
        "~",
        "sess_",
        "saved",
        ".idle",
        real,
        "é",
        "%ff",
        "..%c0%af",
        "‮",
        "%0a",
    ]
    before = sorted(path.name for path in folder.iterdir())
    names = [
        "../outside",
        "..%2foutside",
        real.upper(),
        real + "%00",
        real + "%0a",
        real[:-1],
        f"{real}.saved",
        "/etc/passwd",
    ]
    names += ["".join(source.choices(parts, k=source.randrange(1, 6))) for _ in range(5000 if TORTURE else 40)]
    for name in names:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/restore"), ("POST", "/save"), ("GET", "/state")):
            content = {"json": {}} if method == "POST" else {}
            request = client.build_request(method, f"/v1/sessions/{name}{path}", **content)  # type: ignore[arg-type]
            if request.url.raw_path.rstrip(b"/") == f"/v1/sessions/{real}{path}".encode():
                continue  # the real name, or one that the client has resolved to it
            answer = client.send(request)
            assert answer.status_code in (404, 405, 422), (name, answer.status_code)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert outside.read_bytes() == b"secret"
    assert client.get(f"/v1/sessions/{real}").status_code == 200


@pytest.fixture
def small(text: TextModel, tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(width=4, rows=4, state_folder=tmp_path, max_sessions=3, idle_after=10, max_session_age=100)
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as made:
        yield made


def tidy(client: TestClient, later: float) -> None:
    assert client.portal is not None
    client.portal.call(table(client).tidy, time.time() + later)


def test_idle_sessions_move_to_disk_and_return(small: TestClient, tmp_path: Path) -> None:
    name, busy = create(small, prompt="idle", seed=1), create(small, prompt="idle", seed=1)
    assert turn(small, name) == turn(small, busy)
    tidy(small, 11)
    assert not small.get(f"/v1/sessions/{name}").json()["in_memory"]
    assert table(small).state_bytes == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".idle"}
    assert turn(small, name, max_tokens=30) == turn(small, busy, max_tokens=30)
    assert small.get(f"/v1/sessions/{name}").json()["in_memory"]
    tidy(small, 101)
    assert small.get(f"/v1/sessions/{name}").status_code == 404
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_sessions_is_limited(small: TestClient) -> None:
    names = [create(small) for _ in range(3)]
    for path in ("/v1/sessions", f"/v1/sessions/{names[0]}/fork"):
        refused = small.post(path, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
        assert int(refused.headers["retry-after"]) > 0
    assert small.delete(f"/v1/sessions/{names[0]}").json()["deleted"]
    create(small)


def test_sessions_survive_a_restart(text: TextModel, tmp_path: Path) -> None:
    settings = Settings(width=4, rows=4, state_folder=tmp_path)
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as first:
        name, twin = (create(first, prompt="restart", seed=6) for _ in range(2))
        post(first, f"/v1/sessions/{name}/save")
        early = turn(first, name, max_tokens=20)
        turn(first, twin, max_tokens=20)
        expected = turn(first, twin, max_tokens=20)
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as second:
        # Shut down in order: the last state is there, and the saved one as well.
        assert turn(second, name, max_tokens=20) == expected
        post(second, f"/v1/sessions/{name}/restore")
        assert turn(second, name, max_tokens=20) == early
    with TestClient(create_app({"tiny": tiny(8)}, settings), base_url=BASE) as other:
        refused = other.post(f"/v1/sessions/{name}/continue", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_unusable")


def test_links_are_not_followed(text: TextModel, tmp_path: Path) -> None:
    """A link, a folder or a pipe in place of a session file is refused, and a save replaces a link, not its target."""
    folder, target = tmp_path / "sessions", tmp_path / "target"
    folder.mkdir()
    target.write_bytes(b"other")
    names = [f"sess_{secrets.token_hex(16)}" for _ in range(3)]
    settings = Settings(width=4, rows=4, state_folder=folder)
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as client:
        for name in names:
            own = create(client, prompt="x")
            table(client).table[name] = table(client).table.pop(own)
            table(client).table[name].name = name
        (folder / f"{names[0]}.saved").symlink_to(target)
        (folder / f"{names[1]}.saved").mkdir()
        os.mkfifo(folder / f"{names[2]}.saved")
        for name in names:
            table(client).table[name].saved = True
            assert client.post(f"/v1/sessions/{name}/restore", json={}).status_code == 409
        post(client, f"/v1/sessions/{names[0]}/save")
        assert target.read_bytes() == b"other"
        assert not (folder / f"{names[0]}.saved").is_symlink()
        assert client.post(f"/v1/sessions/{names[1]}/save", json={}).status_code == 409


def test_kills_in_mid_save(tmp_path: Path) -> None:
    """A process that saves all the time is killed at random instants: the file is always one complete version, and the
    next start removes what is left over."""
    versions = [bytes([65 + n]) * 300_000 for n in range(3)]
    store, name, source = Store(tmp_path), new_name(), random.Random(5)
    store.write(name, "saved", versions[0])
    for _ in range(300 if TORTURE else 12):
        child = os.fork()
        if child == 0:
            while True:
                for version in versions:
                    store.write(name, "saved", version)
        time.sleep(source.uniform(0.001, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert store.read(name, "saved") in versions
    assert [(found, kind, size) for found, kind, size, _ in Store(tmp_path).sizes()] == [(name, "saved", 300_000)]
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.saved"]


def test_a_busy_session_is_refused(client: TestClient) -> None:
    name = create(client, prompt="busy")
    session = table(client).find(name)
    session.busy = True
    for method, path in (("POST", "/continue"), ("POST", "/save"), ("POST", "/restore"), ("DELETE", "")):
        answer = client.request(method, f"/v1/sessions/{name}{path}", json={} if method == "POST" else None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
    session.busy = False
    assert turn(client, name)


@pytest.mark.parametrize("family", ["transformer-xl", "lstm"])
def test_other_families(family: str) -> None:
    import longspan

    keys = {} if family == "lstm" else {"heads": 2}
    reading = {"segment": 8} if family == "lstm" else {"segment": 8, "memory": 0}
    text = longspan.init(family, layers=1, width=16, device="cpu", reading=reading, **keys)  # type: ignore[arg-type]
    with TestClient(create_app({"tiny": text}, Settings(width=2, rows=2)), base_url=BASE) as client:
        name = create(client, prompt="once upon a time", seed=1)
        state = client.get(f"/v1/sessions/{name}/state").content
        kind = {"content-type": "application/octet-stream"}
        copy = client.post("/v1/sessions/import", content=state, headers=kind).json()["id"]
        assert turn(client, name, max_tokens=20) == turn(client, copy, max_tokens=20)
