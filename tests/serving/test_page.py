"""The endpoints of the page against the library."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

import longspan
from longspan.experiments.figures.attention import last_attention
from longspan.serving.app import create_app
from longspan.serving.page import jobs, routes
from longspan.serving.settings import Settings
from longspan.text_model import TextModel
from tests.serving.conftest import BASE, tiny

TEXT = "The captain came down to the harbour. Né à Paris, the boy looked up at the captain. "


def recurrent() -> TextModel:
    return longspan.init("lstm", layers=1, width=16, device="cpu", reading={"segment": 16})


@pytest.fixture(scope="module")
def page(text: TextModel) -> Iterator[TestClient]:
    texts = {"tiny": text, "other": tiny(1), "lstm": recurrent()}
    with TestClient(create_app(texts, Settings(width=4, rows=4)), base_url=BASE) as made:
        yield made


def start(client: TestClient, path: str, **body: Any) -> str:
    response = client.post(path, json=body)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def finished(client: TestClient, name: str) -> dict[str, Any]:
    for _ in range(6000):
        job = client.get(f"/page/jobs/{name}").json()
        if job["state"] != "running":
            return dict(job)
        time.sleep(0.02)
    raise AssertionError("the job did not end")


def result(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    job = finished(client, start(client, path, **body))
    assert job["state"] == "finished", job["error"]
    assert job["done"] == job["total"]
    return dict(job["result"])


def test_the_page_needs_nothing_from_elsewhere(page: TestClient) -> None:
    answer = page.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text
    assert "style=" not in answer.text
    for path in sorted(routes.STATIC.rglob("*.*")):
        found = page.get(f"/static/{path.relative_to(routes.STATIC)}")
        assert found.content == path.read_bytes()
    assert page.get("/static/js/main.js").headers["content-type"].startswith("text/javascript")


def test_models_say_what_they_have(page: TestClient, text: TextModel) -> None:
    first, _, lstm = page.get("/page/models").json()["models"]
    assert first["id"] == "tiny"
    assert first["parameters"] == text.parameter_count
    assert first["state_bytes"] == text.initial_state(1, filled=True, trainable=False).nbytes_per_row()
    assert (first["memory_can_change"], lstm["memory_can_change"]) == (True, False)


def test_look_has_the_weights_of_the_observer(page: TestClient, text: TextModel) -> None:
    name = start(page, "/page/look", text=TEXT)
    job = finished(page, name)
    shown = job["result"]
    assert "".join(shown["tokens"]) == TEXT
    assert shown["tokens"][TEXT.index("é")] == ""  # its first byte completes nothing
    ids = text.tokenizer.encode(TEXT)
    losses = text.score(TEXT).losses
    assert losses is not None
    assert shown["bits"][1:] == pytest.approx(losses / np.log(2), abs=1e-3)
    # The last segment has the queries 80 to 84.
    expected = last_attention(text.model, ids[:-1], len(ids) - 1 - 80).numpy()
    token = len(ids) - 1
    for layer, head in ((None, None), (1, 0)):
        asked = {"token": token, "layer": layer, "head": head}
        found = page.post(f"/page/jobs/{name}/token", json=asked).json()
        weights = expected[:, :, -1].mean(axis=(0, 1)) if layer is None else expected[layer, head, -1]
        assert sum(found["earlier"]) == pytest.approx(1, abs=1e-5)
        assert found["earlier"][::-1][: len(weights)] == pytest.approx(weights[:token], abs=1e-5)
        assert found["later"] == []
        before = page.post(f"/page/jobs/{name}/token", json={**asked, "token": token - 5}).json()
        assert before["later"][-1] == pytest.approx(found["earlier"][token - 5], abs=1e-6)
    state = None
    for begin in range(0, len(ids) - 1, 16):
        logits, state = text(torch.from_numpy(ids[begin : min(begin + 16, len(ids) - 1)].astype(np.int64))[None], state)
    chances, tokens = logits[0, -1].softmax(-1).topk(10)
    assert [one["probability"] for one in found["candidates"]] == pytest.approx(chances.tolist(), abs=1e-5)
    assert [one["is_actual"] for one in found["candidates"]] == [int(ids[-1]) == int(one) for one in tokens]


def test_look_without_attention_says_so(page: TestClient) -> None:
    name = start(page, "/page/look", model="lstm", text=TEXT)
    shown = finished(page, name)["result"]
    assert (shown["layers"], shown["heads"]) == (0, 0)
    found = page.post(f"/page/jobs/{name}/token", json={"token": 5}).json()
    assert (found["earlier"], found["later"]) == (None, None)
    assert len(found["candidates"]) == 10


def test_compare_equals_scores_with_that_memory(page: TestClient, text: TextModel) -> None:
    shown = result(page, "/page/compare", text=TEXT, models=["tiny"], memories=[0, 8, 64])
    expected = [
        text.score(TEXT, memory=0, method="stream"),
        text.score(TEXT, memory=8),
        text.score(TEXT, memory=64, clamp=35),
    ]
    for way, score in zip(shown["ways"], expected, strict=True):
        assert way["bits_per_byte"] == pytest.approx(score.bits_per_byte, abs=1e-5)
        assert way["bits"][-1] == pytest.approx(score.bits_per_byte, abs=1e-4)
        assert way["places"][-1] == len(TEXT.encode())
    saved = (expected[0].losses - expected[2].losses) / np.log(2)
    assert shown["gains"][1] == pytest.approx(saved, abs=1e-3)
    best = shown["helped_tokens"][1][0]
    assert best["begin"] == int(saved.argmax()) + 1
    assert best["before"] - best["after"] == pytest.approx(saved.max(), abs=2e-3)


def test_compare_two_models(page: TestClient, text: TextModel) -> None:
    shown = result(page, "/page/compare", text=TEXT, models=["tiny", "other"])
    assert [way["model"] for way in shown["ways"]] == ["tiny", "other"]
    expected = [text.score(TEXT).bits_per_byte, tiny(1).score(TEXT).bits_per_byte]
    assert [way["bits_per_byte"] for way in shown["ways"]] == pytest.approx(expected, abs=1e-5)


def test_measure_equals_eval(page: TestClient, text: TextModel) -> None:
    shown = result(page, "/page/measure", text=TEXT * 6)
    expected = text.score(TEXT * 6)
    assert shown["bits_per_byte"] == pytest.approx(expected.bits_per_byte, abs=1e-5)
    assert shown["bits_per_token"] == pytest.approx(expected.bits, abs=1e-5)
    assert np.mean(shown["curve"]["bits"]) == pytest.approx(expected.bits, rel=0.05)
    for passage in shown["passages"]:
        assert passage["text"] == (TEXT * 6).encode()[passage["begin"] : passage["end"]].decode()
    lstm = result(page, "/page/measure", model="lstm", text=TEXT)
    assert lstm["bits_per_byte"] == pytest.approx(recurrent().score(TEXT).bits_per_byte, abs=1e-5)


def test_bits_against_memory_read_the_middle(
    page: TestClient, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "SAMPLE", 60)
    shown = result(
        page, "/page/memory", text="x" * 100 + "the middle of this text is read, and that is all" + "y" * 100
    )
    assert shown["bytes"] == 60
    assert [way["memory"] for way in shown["ways"]] == list(routes.MEMORIES)
    middle = "x" * 6 + "the middle of this text is read, and that is all" + "y" * 6
    assert shown["ways"][1]["bits_per_byte"] == pytest.approx(
        text.score(middle, memory=64, clamp=35).bits_per_byte, abs=1e-5
    )


def test_a_job_shows_partial_results_and_can_be_cancelled(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    go, at = threading.Event(), threading.Event()
    read = routes.analyses.RunningScore.read

    def slowly(self: Any) -> Iterator[int]:
        for done in read(self):
            yield done
            if done >= 64:
                at.set()
                go.wait(20)

    monkeypatch.setattr(routes.analyses.RunningScore, "read", slowly)
    name = start(page, "/page/measure", text=TEXT * 3)
    assert at.wait(20)
    job = page.get(f"/page/jobs/{name}").json()
    assert job["state"] == "running"
    assert 0 < job["done"] < job["total"]
    assert job["result"]["bytes_read"] == 65
    assert job["result"]["bits_per_byte"] > 0
    assert page.delete(f"/page/jobs/{name}").status_code == 200
    go.set()
    job = finished(page, name)
    assert job["state"] == "cancelled"
    assert job["result"]["bytes_read"] < len(TEXT.encode()) * 3


def test_decoding_goes_on_during_a_job(page: TestClient) -> None:
    name = start(page, "/page/measure", text=TEXT * 200)
    answer = page.post("/v1/completions", json={"prompt": "a", "max_tokens": 20}).json()
    state = page.get(f"/page/jobs/{name}").json()["state"]
    page.delete(f"/page/jobs/{name}")
    assert answer["usage"]["completion_tokens"] == 20
    assert state == "running"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/page/look", {}, "text"),
        ("/page/look", {"text": ""}, "text"),
        ("/page/look", {"text": "a"}, "text"),  # one token
        ("/page/look", {"text": "\udcff", "memory": 4}, "text"),
        ("/page/look", {"text": "abc", "memory": -1}, "memory"),
        ("/page/look", {"text": "abc", "path": "/etc"}, "path"),
        ("/page/compare", {"text": "abc", "models": ["tiny"], "memories": [4]}, "memories"),
        ("/page/compare", {"text": "abc", "models": ["tiny", "other"], "memories": [4, 5]}, "memories"),
        ("/page/compare", {"text": "abc", "models": []}, "models"),
        ("/page/compare", {"text": "abc", "models": ["lstm"], "memories": [0, 4]}, "text"),
        ("/page/measure", {"text": "a" * 1_000_001}, "text"),
    ],
)
def test_bad_requests_are_refused_by_name(page: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    response = page.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in (param, None)


def test_unknown_jobs_tokens_and_too_many_jobs(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.get("/page/jobs/x").status_code == 404
    assert page.delete("/page/jobs/job_0").status_code == 404
    name = start(page, "/page/look", text=TEXT)
    finished(page, name)
    for bad in ({"token": 10_000}, {"token": 3, "layer": 2}, {"token": -1}, {"token": "3"}, {}):
        assert page.post(f"/page/jobs/{name}/token", json=bad).status_code == 400
    measured = start(page, "/page/measure", text=TEXT)
    finished(page, measured)
    assert page.post(f"/page/jobs/{measured}/token", json={"token": 1}).status_code == 400
    monkeypatch.setattr(jobs, "MOST_RUNNING", 0)
    assert page.post("/page/measure", json={"text": TEXT}).status_code == 429


def test_old_results_are_dropped(page: TestClient) -> None:
    names = [finished(page, start(page, "/page/measure", text="abc"))["id"] for _ in range(2)]
    for _ in range(jobs.MOST_KEPT + 1):
        finished(page, start(page, "/page/measure", text="abc"))
    assert [page.get(f"/page/jobs/{name}").status_code for name in names] == [404, 404]


def test_status_counts_and_gives_no_names(page: TestClient) -> None:
    before = page.get("/page/status").json()
    made = page.post("/v1/sessions", json={"prompt": "some text"}).json()
    page.post(f"/v1/sessions/{made['id']}/continue", json={"max_tokens": 7})
    after = page.get("/page/status")
    assert made["id"] not in after.text
    after = after.json()
    assert after["models"][0]["generated_tokens"] - before["models"][0]["generated_tokens"] == 7
    assert after["sessions"] == before["sessions"] + 1
    assert after["recent"][0]["tokens"] == 16
    assert after["state_bytes"] - before["state_bytes"] == after["recent"][0]["state_bytes"] > 0
    page.delete(f"/v1/sessions/{made['id']}")


def test_forget_deletes_sessions_that_run(page: TestClient) -> None:
    names = [page.post("/v1/sessions", json={"prompt": "some text"}).json()["id"] for _ in range(2)]
    running = threading.Thread(
        target=lambda: page.post(f"/v1/sessions/{names[0]}/continue", json={"max_tokens": 50_000})
    )
    running.start()
    while not page.get(f"/v1/sessions/{names[0]}").json()["busy"]:
        time.sleep(0.01)
    assert page.post("/page/forget", json={"sessions": [*names, "sess_x", "../x"]}).json() == {"deleted": 2}
    running.join(20)
    assert [page.get(f"/v1/sessions/{name}").status_code for name in names] == [404, 404]


def test_with_an_api_key_the_page_opens_and_its_data_does_not(text: TextModel) -> None:
    settings = Settings(width=4, rows=4, api_key="0123456789abcdef")
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as client:
        assert client.get("/").status_code == 200
        assert client.get("/static/js/main.js").status_code == 200
        assert client.get("/page/models").status_code == 401
        assert client.post("/page/measure", json={"text": TEXT}).status_code == 401
        key = {"Authorization": "Bearer 0123456789abcdef"}
        assert client.get("/page/models", headers=key).status_code == 200
