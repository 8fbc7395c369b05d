"""Host, Origin, key, bodies and headers: what is refused changes nothing."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from longspan.errors import ConfigError
from longspan.serving.app import create_app
from longspan.serving.settings import Settings
from longspan.text_model import TextModel
from tests.serving.conftest import BASE

KEY = "0123456789abcdef-key"
GOOD_HOSTS = ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:8000"]
BAD_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8000",
    "localhost.",
    "localhost:8000@evil.example",
    "evil.example#localhost",
    "xn--lcalhost-7hb",
    "127.0.0.1:port",
    "127.0.0.1:",
    "127.1",
    "2130706433",
    "0.0.0.0:8000",
    "[::]:8000",
    "[::1",
    " localhost",
    "192.168.0.7:8000",
    "",
]
ORIGINS = [
    None,
    "http://127.0.0.1:8000",
    "null",
    "http://evil.example",
    "https://127.0.0.1:8001",
    "http://127.0.0.1",
    "http://localhost:8000",
    "http://127.0.0.1:8000.evil.example",
    "file://",
]
BODIES = [("application/json", b"{}"), ("text/plain", b"{}"), ("application/x-www-form-urlencoded", b"a=b")]


def sessions(client: TestClient) -> int:
    return len(client.app.state.server.sessions.table)  # type: ignore[attr-defined]


def test_host_and_origin_matrix(client: TestClient) -> None:
    """Every combination: a session is created only by a request to this server, from its own page or from none."""
    cases = [*itertools.product(GOOD_HOSTS[:2], ORIGINS, BODIES), *itertools.product(BAD_HOSTS, ORIGINS, BODIES[:1])]
    assert len(cases) >= 200
    for host, origin, (kind, body) in cases:
        headers = {"host": host, "content-type": kind, **({} if origin is None else {"origin": origin})}
        before = sessions(client)
        answer = client.post("/v1/sessions", content=body, headers=headers)
        allowed = host in GOOD_HOSTS and origin in (None, f"http://{host}") and kind == "application/json"
        assert (answer.status_code == 201) == allowed, (host, origin, kind, answer.text)
        assert sessions(client) == before + allowed
        assert "access-control-allow-origin" not in answer.headers
        if allowed:
            client.delete(f"/v1/sessions/{answer.json()['id']}")
        else:
            assert answer.status_code in (403, 415, 421)


def test_good_hosts_and_fetch_metadata(client: TestClient) -> None:
    for host in GOOD_HOSTS:
        assert client.get("/health", headers={"host": host}).status_code == 200
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 403), ("same-site", 403), ("x", 403)):
        answer = client.post("/tokenize", json={"prompt": "a"}, headers={"sec-fetch-site": site})
        assert answer.status_code == status
    assert client.options("/v1/sessions", headers={"access-control-request-method": "POST"}).status_code == 405


def test_headers_of_every_answer(client: TestClient) -> None:
    for answer in (client.get("/health"), client.get("/none"), client.post("/v1/score", content=b"x")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


@pytest.fixture
def locked(text: TextModel) -> Iterator[TestClient]:
    settings = Settings(width=2, rows=2, host="0.0.0.0", api_key=KEY, allowed_hosts=("models.example",))
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as made:
        yield made


def test_api_key(locked: TestClient) -> None:
    paths = ["/v1/models", "/metrics", "/tokenizer_info", "/openapi.json", "/v1/sessions/x", "/health/"]
    for given in (
        None,
        "",
        "Bearer",
        "Bearer x",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \xff",
    ):
        headers = {} if given is None else {"authorization": given.encode("latin-1")}
        for path in paths:
            answer = locked.get(path, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401, (given, path)
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert locked.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    assert locked.get("/health").status_code == 200


def test_all_addresses_allow_addresses_and_given_names(locked: TestClient) -> None:
    for host, status in (
        ("192.168.0.7:8000", 200),
        ("[fe80::1]:8000", 200),
        ("models.example", 200),
        ("evil.example", 421),
    ):
        assert locked.get("/health", headers={"host": host}).status_code == status


def test_other_addresses_need_a_key() -> None:
    for host in ("0.0.0.0", "192.168.0.7", "::", "example.org"):
        with pytest.raises(ConfigError, match="API key"):
            Settings(host=host)
        assert Settings(host=host, api_key=KEY).host == host
    with pytest.raises(ConfigError, match="16 characters"):
        Settings(api_key="short")
    assert KEY not in repr(Settings(api_key=KEY))


def test_bodies_and_headers_are_limited(client: TestClient) -> None:
    big = b"{" + b" " * (1 << 20) + b"}"
    kind = {"content-type": "application/json"}
    began = time.perf_counter()
    answer = client.post("/v1/completions", content=big, headers=kind)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    # Announced, not sent: refused before a byte is read.
    answer = client.post("/v1/completions", content=b"{}", headers={**kind, "content-length": str(100 << 20)})
    assert answer.status_code == 413
    answer = client.post("/v1/completions", content=iter([big[:600_000]] * 2), headers=kind)
    assert answer.status_code == 413
    assert time.perf_counter() - began < 30
    assert client.get("/health", headers={"x-long": "x" * 20_000}).status_code == 431
    assert client.get("/health", headers={"content-length": "-1"}).status_code == 400


def test_slow_bodies_end(text: TextModel) -> None:
    """A body that never ends is refused after the time limit."""
    import asyncio

    app = create_app({"tiny": text}, Settings(width=1, rows=1, body_timeout=0.05))
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers, "query_string": b""}
    asyncio.run(app(scope | {"raw_path": b"/tokenize", "root_path": "", "http_version": "1.1"}, receive, send))
    assert sent[0]["status"] == 408


def test_static_files_stay_inside(client: TestClient, tmp_path: Path) -> None:
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/%00",
        "/static//etc/passwd",
    ):
        assert client.get(path).status_code in (404, 400)
