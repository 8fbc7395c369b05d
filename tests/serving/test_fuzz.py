"""Random requests, right and wrong: no 5xx, no traceback, no status that the docs do not list."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from longspan.serving.app import create_app
from longspan.serving.settings import Settings
from longspan.text_model import TextModel
from tests.serving.conftest import BASE

DOCUMENTED = {200, 201, 400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 429, 431}
COUNT = 20_000 if os.environ.get("LONGSPAN_TORTURE") else 500
PATHS = {
    "/v1/completions": [
        *("model", "prompt", "max_tokens", "n", "best_of", "echo", "logprobs", "stop", "seed", "temperature", "top_p"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "stream", "stream_options", "suffix", "user"),
    ],
    "/v1/sessions": ["model", "prompt", "seed", "id"],
    "/v1/sessions/NAME/continue": ["prompt", "max_tokens", "stop", "seed", "temperature", "logprobs", "stream", "n"],
    "/v1/sessions/NAME/fork": ["seed"],
    "/v1/sessions/NAME/save": [],
    "/v1/sessions/NAME/restore": [],
    "/v1/sessions/NAME/stop": [],
    "/v1/sessions/NAME/state": [],
    "/v1/sessions/NAME": [],
    "/v1/sessions/import": [],
    "/v1/score": ["model", "text", "tokens", "words"],
    "/tokenize": ["model", "prompt"],
    "/detokenize": ["model", "tokens"],
    "/tokenizer_info": [],
    "/v1/models": [],
    "/health": [],
    "/ready": [],
    "/metrics": [],
    "/page/look": ["model", "text", "memory"],
    "/page/compare": ["text", "models", "memories"],
    "/page/measure": ["model", "text"],
    "/page/memory": ["model", "text"],
    "/page/forget": ["sessions"],
    "/page/jobs/NAME": [],
    "/page/jobs/NAME/token": ["token", "layer", "head"],
    "/page/models": [],
    "/page/status": [],
    "/openapi.json": [],
    "/static/x": [],
    "/": [],
}
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 7, 16, 2**31, 2**63, 2**64, 10**400, 0.0, 0.5, 1.0, -0.0, 1e-320, 1e308, 2.5,
    "", "a", "tiny", "é", "\x00", "a\x00b", "\n", "x" * 3000, "👍", "NaN", "../..", [], [0], [1, 2, 3], [255], [256],
    [-1], [1.5], ["a", "b"], [["a"]], [[1], [2, 3]], [[]], [None], [True], {}, {"1": 1.0}, {"256": 1}, {"a": None},
    {"include_usage": True}, {"include_usage": 1}, [[1] * 100] * 3, "\u202e", ["", ""], ["a"] * 30, [0] * 5000,
]  # fmt: skip


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ["x"]

    def value(self) -> Any:
        chosen = self.random.choice(VALUES)
        return [chosen] if self.random.random() < 0.03 else chosen

    def body(self, keys: list[str]) -> bytes:
        source = self.random
        kind = source.random()
        if kind < 0.06:
            return source.randbytes(source.randrange(60))
        if kind < 0.1:
            return source.choice(
                [b"", b"[]", b"null", b"{", b'"x"', b"[" * 9000, b'{"a":' * 5000, b"{}x", b"\x00", b"NaN"]
            )
        chosen = {key: self.value() for key in keys if source.random() < 0.3}
        if source.random() < 0.5:
            good = {"prompt": "ab", "text": "abc", "tokens": [1], "max_tokens": 3}
            chosen |= {key: value for key, value in good.items() if key in keys}
        if source.random() < 0.05:
            chosen[source.choice(["extra", "", "\x00", "top_k", "a" * 500])] = self.value()
        data = json.dumps(chosen).encode()
        if source.random() < 0.07:
            place = source.randrange(len(data))
            data = data[:place] + source.randbytes(1) + data[place + 1 :]
        return data

    def request(self) -> dict[str, Any]:
        source = self.random
        path = source.choice(list(PATHS))
        url = path.replace("NAME", source.choice(self.names[-4:]))
        if source.random() < 0.04:
            url += source.choice(["/", "%00", "/..", "?a=%ff", "/x", "%2e", "?model=" + "y" * 400, "#a", ";x"])
        method = source.choices(
            ["POST", "GET", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "X"], [60, 20, 4, 2, 2, 2, 2, 1]
        )[0]
        kind = "application/octet-stream" if "import" in path else "application/json"
        if source.random() < 0.04:
            kind = source.choice(["text/plain", "", "application/json; charset=utf-16", "multipart/form-data", "\xff"])
        headers: dict[str, Any] = {"content-type": kind.encode("latin-1")}
        if source.random() < 0.04:
            name = source.choice(
                ["host", "origin", "content-length", "authorization", "sec-fetch-site", "accept", "expect"]
            )
            headers[name] = source.choice([b"", b"\xff", b"null", b"x" * 200, b"-1", b"9" * 30, b"localhost", b"1e3"])
        return {"method": method, "url": url, "headers": headers, "content": self.body(PATHS[path])}


@pytest.fixture
def fuzzed(text: TextModel, tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(
        width=4, rows=8, queue=64, max_tokens=6, max_choices=8, max_body=1 << 16, state_folder=tmp_path, max_sessions=40
    )
    app = create_app({"tiny": text}, settings)
    with TestClient(app, base_url=BASE, raise_server_exceptions=True) as made:
        yield made


def test_fuzzed_requests(fuzzed: TestClient) -> None:
    """An exception in a route is raised here by the client, so a traceback fails the test as well."""
    fuzzer, seen = Fuzzer(int(os.environ.get("LONGSPAN_SEED", "1"))), set()
    for number in range(COUNT):
        request = fuzzer.request()
        answer = fuzzed.request(**request)
        seen.add(answer.status_code)
        assert answer.status_code in DOCUMENTED, (number, request, answer.text[:300])
        if answer.status_code >= 400 and answer.content:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, request
            assert "Traceback" not in answer.text
        if answer.status_code == 201:
            fuzzer.names.append(answer.json()["id"])
    assert {200, 201, 400, 404, 405} <= seen
    assert fuzzed.get("/health").status_code == 200
    engine = fuzzed.app.state.server.models.find(None).engine  # type: ignore[attr-defined]
    assert engine.idle()
