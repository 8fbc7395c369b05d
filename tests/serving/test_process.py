"""A real server: the openai package as a client, raw sockets, SIGTERM and SIGKILL."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from longspan.serving.app import create_app
from longspan.serving.protocol import protocol_with_timeout
from longspan.serving.settings import Settings
from longspan.text_model import TextModel, load
from tests.serving.conftest import BASE, tiny

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def address(text: TextModel) -> Iterator[str]:
    """uvicorn in a thread. Two rows and one place in the queue, so that it is soon full."""
    app = create_app({"tiny": text}, Settings(width=2, rows=2, queue=1, max_tokens=100_000))
    config = uvicorn.Config(app, http=protocol_with_timeout(1.0), loop="asyncio", ws="none", log_level="warning")
    server = uvicorn.Server(config)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


def connect(address: str, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="unused", **options)


def test_openai_completions_and_streams(address: str) -> None:
    client = connect(address)
    assert [model.id for model in client.models.list()] == ["tiny"]
    body: Any = {"model": "tiny", "prompt": "It was", "max_tokens": 12, "seed": 1, "temperature": 0.8, "logprobs": 3}
    answer = client.completions.create(**body)
    choice = answer.choices[0]
    assert answer.usage.completion_tokens == 12 == len(choice.logprobs.token_logprobs)
    assert choice.finish_reason == "length"
    assert 3 <= len(choice.logprobs.top_logprobs[0]) <= 4
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", suffix="b")
    assert refused.value.param == "suffix"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_lm_eval_gives_the_losses_of_direct_scoring(address: str, text: TextModel) -> None:
    """lm-eval's own client: tokens from the server, echo, log-probabilities. Pairs of sentences as in BLiMP."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    pytest.importorskip("tenacity")
    pytest.importorskip("aiohttp")
    from lm_eval.api.instance import Instance

    model = completions.LocalCompletionsAPI(base_url=f"{address}/v1/completions", model="tiny", num_concurrent=1)
    assert model.tokenizer_backend == "remote"
    pairs = [("", "The cats sleep."), ("", "The cats sleeps."), ("Who did", " she see?"), ("é", "à la carte")]
    asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    for (context, continuation), (found, is_greedy) in zip(pairs, model.loglikelihood(asked), strict=True):
        start = (context or "\n").encode()
        losses = text.score(start + continuation.encode()).losses
        assert losses is not None
        assert found == pytest.approx(-float(losses[len(start) - 1 :].sum()), abs=1e-4)
        assert not is_greedy


def test_openai_retries_after_429(address: str) -> None:
    """The server is full for a while: refused at once with Retry-After, and the client tries again until it is not."""
    client = connect(address, max_retries=0)
    streams = [
        client.completions.create(model="tiny", prompt="a", max_tokens=100_000, stream=True, n=1) for _ in range(3)
    ]
    next(iter(streams[0]))
    began = time.perf_counter()
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert time.perf_counter() - began < 15
    assert refused.value.response.headers["retry-after"] == "1"
    assert httpx.get(f"{address}/ready").status_code == 503
    assert httpx.get(f"{address}/health").status_code == 200

    def leave() -> None:
        time.sleep(0.3)
        for stream in streams:
            stream.close()

    thread = threading.Thread(target=leave)
    thread.start()
    assert connect(address, max_retries=5).completions.create(model="tiny", prompt="a", max_tokens=1).choices
    thread.join()


def test_streams_of_clients_that_left_end(address: str) -> None:
    """Their rows are free again: later requests are served."""
    for _ in range(4):
        with httpx.stream(
            "POST", f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 100_000, "stream": True}
        ) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
    deadline = time.monotonic() + 60
    while httpx.get(f"{address}/metrics").text.find('longspan_running_streams{model="tiny"} 0.0') < 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_raw_bytes_and_slow_senders(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")

    def send(data: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(data)
            return connection.recv(4096)

    assert send(b"\x00\xff\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert send(b"GET / HTTP/9.9\r\nhost: x\r\n\r\n")[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 421")
    two = b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n"
    assert send(two)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 421")
    large = b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 104857600\r\n\r\n"
    began = time.perf_counter()
    assert send(large).startswith(b"HTTP/1.1 413")
    assert time.perf_counter() - began < 8
    assert send(b"GET /health HTTP/1.1\r\nhos") == b""  # closed after the time limit, 1 s here
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for line in (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /health HTTP/1.1\r\nhos"):
            connection.sendall(line)
            while line.endswith(b"\n") and not connection.recv(4096).endswith(b"}"):
                pass
        assert connection.recv(4096) == b""  # the second request of a connection has the same limit


SERVE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from longspan.cli.main import run
limits = ["--width", "2", "--rows", "2", "--grace", "300"]
sys.exit(run(["serve", sys.argv[1], "--port", "0", "--sessions", sys.argv[2], *limits]))
"""


class Process:
    """A server whose messages go to a file."""

    def __init__(self, model: Path, folder: Path, log: Path) -> None:
        self.log = log
        with log.open("wb") as messages:
            command = [sys.executable, "-c", SERVE, str(model), str(folder)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
        address = self.message(r"serving model at (http://127\.0\.0\.1:\d+)")
        self.client = httpx.Client(base_url=address, timeout=300)
        assert self.client.get("/ready").status_code == 200

    def message(self, pattern: str) -> str:
        """The first group of a message that the server has printed or will print."""
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, self.log.read_text())):
            assert time.monotonic() < deadline, (pattern, self.log.read_text())
            assert self.process.poll() is None, (pattern, self.log.read_text())
            time.sleep(0.05)
        return found[found.re.groups]

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code < 300, answer.text
        found: dict[str, Any] = answer.json()
        return found


def test_sigterm_and_sigkill(tmp_path: Path) -> None:
    """SIGTERM in mid-stream, and a second signal that does not wait: the stream ends, the session is saved, the exit
    code is 0, and there is no traceback. SIGKILL in mid-stream: what was saved is there. The bytes after each are those
    of a session that was never interrupted."""
    model, folder = tmp_path / "model", tmp_path / "sessions"
    tiny().save(model)
    first = Process(model, folder, tmp_path / "first")
    name = first.post("/v1/sessions", prompt="never ends", seed=3)["id"]
    twin = first.post(f"/v1/sessions/{name}/fork")["id"]
    path, body = f"/v1/sessions/{name}/continue", {"max_tokens": 60_000, "stream": True}
    with first.client.stream("POST", path, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        chunks = [next(lines) for _ in range(6)]
        first.process.send_signal(signal.SIGTERM)
        first.message("stopping: 1 stream may run for another 300 s")
        first.process.send_signal(signal.SIGINT)
        chunks += list(lines)
    data = [json.loads(line[6:]) for line in chunks if line.startswith("data: {")]
    text = "".join(one["choices"][0]["text"] for one in data)
    assert data[-1]["choices"][0]["finish_reason"] == "length"
    assert "data: [DONE]" in chunks
    assert first.process.wait(30) == 0
    assert "Traceback" not in first.log.read_text()

    second = Process(model, folder, tmp_path / "second")
    tokens = second.post(f"/v1/sessions/{name}/save")["tokens"] - len("never ends")
    assert second.post(f"/v1/sessions/{twin}/continue", max_tokens=tokens)["choices"][0]["text"][: len(text)] == text
    following = second.post(f"/v1/sessions/{twin}/continue", max_tokens=20)["choices"][0]["text"]
    with second.client.stream("POST", path, json=body) as answer:
        next(answer.iter_lines())
        second.process.kill()
    assert second.process.wait(30) == -signal.SIGKILL

    settings = Settings(width=2, rows=2, state_folder=folder)
    with TestClient(create_app({"model": load(model, device="cpu")}, settings), base_url=BASE) as third:
        assert third.post(path, json={"max_tokens": 20}).json()["choices"][0]["text"] == following
