"""AttentionLinks against the weights that the figures record, and the softmax of the logits."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError
from longspan.experiments import attention_links
from longspan.experiments.attention_links import AttentionLinks
from longspan.experiments.figures.attention import last_attention
from tests.support import build

SMALL = {"vocabulary": 30, "layers": 2, "width": 16, "heads": 2, "inner": 16, "segment": 8, "dropout": 0.0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "memory": ("transformer-xl", {"memory": 20}),
    "same length": ("longspan-xl", {"memory": 20, "same_length": True, "clamp": 9, "discount": 1.0}),
    "rotary": ("rotary", {"memory": 20}),
    "vanilla": ("vanilla", {}),
}


def model(family: str, values: dict[str, Any]) -> LanguageModel:
    made = build(family, SMALL | values).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 30, 65).astype(np.uint8)


def links_of(made: LanguageModel, ids: np.ndarray) -> AttentionLinks:
    links = AttentionLinks(made, ids, candidates=4)
    for _ in links.read():
        pass
    return links


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_observer(form: str, ids: np.ndarray) -> None:
    made = model(*FORMS[form])
    links = links_of(made, ids)
    # The queries of the last segment, tokens 56 to 63, predict tokens 57 to 64.
    expected = last_attention(made, ids[:-1], 8).numpy()
    for row, token in enumerate(range(57, 65)):
        for layer, head in ((None, None), (1, None), (None, 1), (0, 1)):
            chosen = expected[
                slice(None) if layer is None else slice(layer, layer + 1),
                slice(None) if head is None else slice(head, head + 1),
                row,
            ].mean(axis=(0, 1))[:token]
            found = links.earlier(token, layer, head)
            assert found.shape == (token,)
            assert found.sum() == pytest.approx(1, abs=1e-5)
            assert found[::-1][: len(chosen)] == pytest.approx(chosen, abs=1e-5)
        far = expected[:, :, row, 5:token].sum(axis=-1)
        assert links.far_shares(token, 5) == pytest.approx(far, abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_later_is_earlier_seen_from_the_other_side(form: str, ids: np.ndarray) -> None:
    links = links_of(model(*FORMS[form]), ids)
    for layer, head in ((None, None), (1, 0)):
        table = np.zeros((65, 65), np.float32)
        for token in range(65):
            table[token, :token] = links.earlier(token, layer, head)
        for token in (0, 1, 7, 8, 30, 63, 64):
            assert links.later(token, layer, head) == pytest.approx(table[token + 1 :, token], abs=1e-6)


def test_candidates_and_losses_are_those_of_the_logits(ids: np.ndarray) -> None:
    made = model(*FORMS["memory"])
    links, state, logs = links_of(made, ids), None, []
    for begin in range(0, 64, 8):
        logits, state = made(torch.from_numpy(ids[begin : begin + 8].astype(np.int64))[None], state)
        logs.append(logits[0].double().log_softmax(-1))
    chances = torch.cat(logs).exp().detach().numpy()
    assert np.isnan(links.nats[0])
    assert links.nats[1:] == pytest.approx(-np.log(chances[np.arange(64), ids[1:]]), abs=1e-4)
    assert links.candidates[1:].tolist() == np.argsort(-chances, axis=1)[:, :4].tolist()
    assert links.probabilities[1:] == pytest.approx(-np.sort(-chances, axis=1)[:, :4], abs=1e-5)


def test_a_family_without_attention_still_has_candidates(ids: np.ndarray) -> None:
    made = build("lstm", {"vocabulary": 30, "layers": 1, "width": 8}).eval()
    links = links_of(made, ids)
    assert not links.has_attention
    assert np.isfinite(links.nats[1:]).all()
    with pytest.raises(ConfigError):
        links.earlier(5)


def test_what_was_not_read_or_does_not_exist_is_refused(ids: np.ndarray) -> None:
    links = AttentionLinks(model(*FORMS["memory"]), ids)
    reading = links.read()
    assert next(reading) == 9
    assert links.earlier(8).sum() == pytest.approx(1)
    with pytest.raises(DataError, match="9"):
        links.earlier(9)
    with pytest.raises(DataError, match="65"):
        links.later(3)
    with pytest.raises(ConfigError, match="layer=2"):
        links.earlier(8, layer=2)
    with pytest.raises(ConfigError, match="head=7"):
        links.earlier(8, head=7)


def test_threads_can_ask_for_more_heads_than_are_kept(ids: np.ndarray) -> None:
    links = links_of(model(*FORMS["memory"]), ids)
    choices = [(layer, head) for layer in (None, 0, 1) for head in (None, 0, 1)]
    expected = {choice: links.later(5, *choice) for choice in choices}

    def ask(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(choices), 40):
            assert np.array_equal(links.later(5, *choices[number]), expected[choices[number]])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


def test_weights_are_returned_even_if_they_are_dropped_at_once(ids: np.ndarray, monkeypatch) -> None:
    """As when other threads ask for other heads at the same time."""
    links = links_of(model(*FORMS["memory"]), ids)
    expected = links.later(5, 0, 1)
    monkeypatch.setattr(attention_links, "KEPT", 0)
    links.later(5)
    assert not links.is_prepared(0, 1)
    assert np.array_equal(links.later(5, 0, 1), expected)


def test_weights_that_were_used_last_are_kept(ids: np.ndarray) -> None:
    links = links_of(model(*FORMS["memory"]), ids)
    for choice in ((None, None), (0, 0), (0, 1), (1, 0), (None, None), (1, 1)):
        links.later(5, *choice)
    assert links.is_prepared()
    assert not links.is_prepared(0, 0)
