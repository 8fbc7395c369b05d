"""POST /v1/completions against the model itself."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from longspan.text_model import TextModel

PROMPT = "It was late, and "


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "seed": 5, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def greedy(text: TextModel, prompt: bytes, count: int) -> bytes:
    """The most likely bytes, computed by the model without any decoder."""
    ids = list(prompt)
    state = None
    with torch.no_grad():
        for position in range(len(ids) + count - 1):
            logits, state = text.model(torch.tensor([[ids[position]]]), state)
            if position == len(ids) - 1:
                ids.append(int(logits[0, -1].argmax()))
    return bytes(ids[len(prompt) :])


def events(client: TestClient, **body: Any) -> list[Any]:
    with client.stream("POST", "/v1/completions", json={"prompt": PROMPT, "seed": 5, "stream": True, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_greedy_equals_the_model(client: TestClient, text: TextModel) -> None:
    answer = complete(client, temperature=0, max_tokens=20)
    assert texts(answer) == [greedy(text, PROMPT.encode(), 20).decode(errors="replace")]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 17, "completion_tokens": 20, "total_tokens": 37}


def test_all_forms_of_a_prompt_agree(client: TestClient) -> None:
    ids = list(PROMPT.encode())
    alone = texts(complete(client))
    assert texts(complete(client, prompt=ids)) == alone
    assert texts(complete(client, prompt=[PROMPT])) == alone
    assert texts(complete(client, prompt=[ids])) == alone
    other = texts(complete(client, prompt="abc"))
    assert texts(complete(client, prompt=[PROMPT, "abc"])) == alone + other
    assert texts(complete(client, prompt=[ids, list(b"abc")])) == alone + other


def test_seed_and_choices(client: TestClient) -> None:
    three = texts(complete(client, n=3))
    assert len(set(three)) == 3
    assert texts(complete(client, n=3)) == three
    assert texts(complete(client)) == three[:1]
    assert texts(complete(client, seed=6)) != three[:1]
    assert texts(complete(client, seed=None)) != texts(complete(client, seed=None))


def test_best_of_returns_the_most_likely(client: TestClient) -> None:
    every = complete(client, n=6, logprobs=0)["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in every}
    ranked = sorted(means, key=lambda key: means[key], reverse=True)
    best = complete(client, n=2, best_of=6)
    assert texts(best) == ranked[:2]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 6 * 12


def test_echo_with_logprobs_equals_scoring(client: TestClient, text: TextModel) -> None:
    """The exact request of lm-eval's local-completions: token ids, echo, one token, the most likely alternative."""
    prompt = (PROMPT * 4).encode()
    body = {"prompt": list(prompt), "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choice = complete(client, **body)["choices"][0]
    logprobs = choice["logprobs"]
    losses = text.score(prompt).losses
    assert losses is not None
    assert logprobs["token_logprobs"][0] is None
    np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], -losses, atol=2e-5)
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == len(prompt) + 1
    with torch.no_grad():
        logits, _ = text.model(torch.tensor([list(prompt[:16])]))
    best = logits[0].log_softmax(-1).max(-1)
    for place in range(1, 16):
        top = logprobs["top_logprobs"][place]
        assert math.isclose(max(top.values()), float(best.values[place - 1]), abs_tol=2e-5)
        is_greedy = int(best.indices[place - 1]) == prompt[place]
        assert (logprobs["token_logprobs"][place] == max(top.values())) == is_greedy
    assert choice["text"][: len(prompt)] == prompt.decode()


def test_echo_without_generation(client: TestClient) -> None:
    answer = complete(client, echo=True, max_tokens=0, logprobs=2)
    assert texts(answer) == [PROMPT]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 0


def test_the_stream_equals_the_whole(client: TestClient) -> None:
    whole = complete(client, n=2, max_tokens=25, logprobs=2, echo=True)
    chunks = events(client, n=2, max_tokens=25, logprobs=2, echo=True, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in range(2):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == whole["choices"][index]["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
        values = [v for c in own if c["logprobs"] for v in c["logprobs"]["token_logprobs"]]
        assert values == whole["choices"][index]["logprobs"]["token_logprobs"]


def test_a_stop_sequence_ends_inside_and_across_tokens(client: TestClient) -> None:
    full = texts(complete(client, prompt="stop", max_tokens=60))[0]
    for begin, size in ((10, 1), (20, 3), (7, 6)):
        stop = full[begin : begin + size]
        cut = full[: full.find(stop)]
        body = {"prompt": "stop", "max_tokens": 60, "stop": [stop, "never there"]}
        answer = complete(client, **body, logprobs=0)
        assert texts(answer) == [cut]
        assert max(answer["choices"][0]["logprobs"]["text_offset"]) < len(cut)  # none of the stop string
        assert answer["choices"][0]["finish_reason"] == "stop"
        chunks = [c for chunk in events(client, **body, logprobs=0) for c in chunk["choices"]]
        assert "".join(c["text"] for c in chunks) == cut
        for key in ("tokens", "token_logprobs", "text_offset"):
            found = [value for c in chunks if c["logprobs"] for value in c["logprobs"][key]]
            assert found == answer["choices"][0]["logprobs"][key]


def test_sampling_parameters(client: TestClient, text: TextModel) -> None:
    best = texts(complete(client, temperature=0))
    assert texts(complete(client, top_p=1e-9)) == best
    assert texts(complete(client, temperature=1e-9)) == best
    assert texts(complete(client, logit_bias={"66": 100.0})) == ["B" * 12]
    free = complete(client, temperature=0, logit_bias={"66": 50.0, "67": 49.0})
    penalised = complete(client, temperature=0, logit_bias={"66": 50.0, "67": 49.0}, frequency_penalty=2.0)
    assert texts(free) != texts(penalised)
    assert {*texts(penalised)[0]} == {"B", "C"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"user": "me"}, "user"),
        ({"top_k": 3}, "top_k"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 301}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"256": 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 101.0}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"seed": 2**70}, "seed"),
        ({"echo": 1}, "echo"),
    ],
)
def test_refused_by_name(client: TestClient, body: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_unknown_model_and_bad_json(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "gpt-9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for body in (b"{", b"[]", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"temperature": NaN}'):
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, body[:20]
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_character_begun_by_the_prompt_is_completed(client: TestClient) -> None:
    """The prompt ends with the first of two bytes of é; the text begins with the complete character."""
    ids = [*b"caf", 0xC3]
    answer = complete(client, prompt=ids, max_tokens=1, logit_bias={str(0xA9): 100.0})
    assert texts(answer) == ["é"]
    echoed = complete(client, prompt=ids, max_tokens=1, logit_bias={str(0xA9): 100.0}, echo=True)
    assert texts(echoed) == ["café"]
    offsets = complete(client, prompt="aéb", max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert offsets["text_offset"] == [0, 1, 1, 2]
    assert offsets["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert offsets["top_logprobs"] is None


def test_an_empty_prompt_starts_with_a_newline(client: TestClient) -> None:
    assert texts(complete(client, prompt="")) == texts(complete(client, prompt="\n"))
    assert texts(complete(client, prompt=None)) == texts(complete(client, prompt=""))


def test_models_tokens_and_health(client: TestClient) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["object"] == "model"
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/ready").status_code == 200
    assert [client.head(path).status_code for path in ("/", "/health", "/ready")] == [200, 200, 200]
    assert client.get("/health/", follow_redirects=False).status_code == 404
    tokens = client.post("/tokenize", json={"prompt": "né", "return_token_strs": True}).json()
    assert tokens["tokens"] == [110, 0xC3, 0xA9]
    assert tokens["token_strs"] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "né"}
    assert client.post("/detokenize", json={"tokens": [999]}).status_code == 400
    assert client.get("/tokenizer_info").json()["size"] == 256


def test_scores(client: TestClient, text: TextModel) -> None:
    passage = "It was late, and the lamp  was out.\n"
    answer = client.post("/v1/score", json={"text": [passage, "ab"], "words": True}).json()
    direct = text.score(passage)
    document = answer["documents"][0]
    assert direct.losses is not None
    np.testing.assert_allclose(document["token_losses"][1:], direct.losses, atol=1e-5)
    assert document["token_losses"][0] is None
    assert math.isclose(document["bits_per_token"], direct.bits, rel_tol=1e-5)
    found = document["words"]
    assert "".join(word["text"] for word in found) == passage
    assert [word["text"].strip() for word in found] == passage.split()
    assert math.isclose(sum(word["nats"] for word in found), document["nats"], rel_tol=1e-5)
    by_hand = sum(direct.losses[1:5])  # " was" after "It": bytes 2 to 5, entry k is the loss of byte k + 1
    assert math.isclose(found[1]["nats"], by_hand, rel_tol=1e-5)
    assert answer["scored"] == len(passage) - 1 + 1
    for bad in ("", "a", [], [1], 5, ["a", 1]):
        assert client.post("/v1/score", json={"text": bad}).status_code == 400


def test_metrics(client: TestClient) -> None:
    complete(client, max_tokens=3)
    lines = client.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}
    assert values['longspan_tokens_total{kind="generated",model="tiny"}'] >= 3
    assert values['longspan_requests_total{route="/v1/completions",status="200"}'] >= 1
    assert values['longspan_time_to_first_token_seconds_count{model="tiny"}'] >= 1
    assert values['longspan_queue_length{model="tiny"}'] == 0
