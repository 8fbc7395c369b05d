"""Attention by distance: against the attention the model itself computes, laid out in full."""

from typing import Any

import numpy as np
import pytest
import torch

from longspan.analysis import attention as under_test
from longspan.analysis.attention import attention_at, attention_by_distance, looks, softmax_seen, sum_of
from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.kernels.relative_attention import reference
from longspan.models.families import build

SMALL = {"vocabulary": 30, "layers": 2, "width": 16, "heads": 2, "inner": 16, "segment": 8, "dropout": 0.0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "memory": ("transformer-xl", {"memory": 20}),
    "same length": ("transformer-xl", {"memory": 20, "same_length": True}),
    "clamp": ("transformer-xl", {"memory": 20, "clamp": 5}),
    "shaw": ("transformer-xl", {"memory": 20, "position": "shaw", "max_distance": 9}),
    "per layer": ("transformer-xl", {"memory": 20, "shared_biases": False, "norm": "pre"}),
    "convolution": ("transformer-xl", {"memory": 20, "convolution": 3}),
    "vanilla": ("vanilla", {}),
    "vanilla convolution": ("vanilla", {"convolution": 3, "qk_norm": True}),
    "vanilla learned": ("vanilla", {"position": "learned"}),
    "vanilla shaw": ("vanilla", {"position": "shaw"}),
}


def model(form: str) -> LanguageModel:
    family, values = FORMS[form]
    made = build(family, SMALL | values).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 30, 101).astype(np.uint8)


class Noted:
    """What `Attention.attend` was called with, and the weights the definition gives for it."""

    def __init__(self, net: LanguageModel) -> None:
        self.weights: list[torch.Tensor] = []
        for layer in net.layers:
            attend = layer.attention.attend
            layer.attention.attend = lambda *given, attend=attend: self.note(*given) or attend(*given)

    def note(self, query, key, value, position, window=None, first_key=None) -> None:
        B, H, K, _ = key.shape
        zero = torch.zeros(H, query.shape[-1])
        r, u, w = (zero[:, None], zero, zero) if position is None else position
        # With unit vectors for values, what attention reads are its weights: a head's width of them at a time.
        width = query.shape[-1]
        units = torch.eye(K, -(-K // width) * width).expand(B, H, -1, -1).split(width, dim=-1)
        read = [
            reference.relative_attention(query, key, unit, r, u, w, window=window, first_key=first_key)
            for unit in units
        ]
        self.weights.append(torch.cat(read, dim=-1)[0, :, :, :K])


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_model(form: str, ids: np.ndarray) -> None:
    net = model(form)
    noted, state = Noted(net), net.initial_state(1)
    for begin in range(0, 96, 8):
        piece = torch.from_numpy(ids[begin : begin + 8].astype(np.int64))[None]
        noted.weights.clear()
        with torch.no_grad():
            layers, state = looks(net, piece, state)
            found = [softmax_seen(sum_of(look.terms()), look.seen()) for look in layers]
        for by_distance, by_key in zip(found, noted.weights, strict=True):
            L, K = by_key.shape[1:]
            for i in range(L):
                backwards = by_key[:, i, : K - L + i + 1].flip(1)
                torch.testing.assert_close(by_distance[:, i, : K - L + i + 1], backwards, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_means_do_not_depend_on_the_blocks(form: str, ids: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(form)
    whole = attention_by_distance(net, ids)
    monkeypatch.setattr(under_test, "_SCORES_AT_ONCE", 100)
    pieces = attention_by_distance(net, ids)
    np.testing.assert_allclose(pieces.attention, whole.attention, atol=1e-7)
    four = form in ("memory", "same length", "clamp", "per layer", "convolution")
    assert set(whole.terms) == (set("abcd") if four else set())
    for kind, found in whole.terms.items():
        np.testing.assert_allclose(pieces.terms[kind], found, atol=1e-7)


def test_means_are_over_queries_with_a_full_memory(ids: np.ndarray) -> None:
    net = model("same length")
    found = attention_by_distance(net, ids)
    assert found.attention.shape == (2, 2, 20)
    assert found.queries == len(ids) - 24  # whole segments after the first 20 tokens
    np.testing.assert_allclose(found.attention.sum(axis=2), 1, atol=1e-6)
    for kind in "abcd":
        np.testing.assert_allclose(found.terms[kind].sum(axis=2), 1, atol=1e-6)


def test_a_text_shorter_than_the_memory_is_read_all_the_same(ids: np.ndarray) -> None:
    found = attention_by_distance(model("memory"), ids[:15])
    assert found.queries == 15
    assert found.attention.shape == (2, 2, 15)


def test_term_d_does_not_look_at_the_text(ids: np.ndarray) -> None:
    net = model("same length")
    one, other = (attention_by_distance(net, text).terms for text in (ids, ids[::-1].copy()))
    np.testing.assert_allclose(one["d"], other["d"], atol=1e-6)
    assert np.abs(one["a"] - other["a"]).max() > 1e-4


def test_spans() -> None:
    attention = np.zeros((1, 2, 10))
    attention[0, 0, 3] = 1.0
    attention[0, 1] = 0.1
    found = under_test.AttentionByDistance(attention, {}, 1, np.ones(10))
    assert found.spans(0.5).tolist() == [[4, 5]]
    assert found.spans(0.9)[0, 0] == 4
    assert found.mean_distances().tolist() == [[3.0, pytest.approx(4.5)]]


@pytest.mark.parametrize("form", ["memory", "vanilla"])
def test_spans_count_what_every_query_gives(form: str, ids: np.ndarray) -> None:
    """A query early in a segment sees less far than a late one; a span is that of all they give, added up."""
    net = model(form)
    net.layers[0].attention.query.weight.data.zero_()  # attends evenly, or by position alone
    given, state, warm = np.zeros((2, 2, 28)), net.initial_state(1), 20 if form == "memory" else 0
    for begin in range(0, len(ids), 8):
        with torch.no_grad():
            layers, state = looks(net, torch.from_numpy(ids[begin : begin + 8].astype(np.int64))[None], state)
            for n, look in enumerate(layers):
                weights = softmax_seen(sum_of(look.terms()), look.seen()).double().sum(dim=1).numpy()
                given[n, :, : weights.shape[1]] += weights if begin >= warm else 0
    found = attention_by_distance(net, ids)
    for share in (0.5, 0.9):
        within = given.cumsum(axis=2) >= share * given.sum(axis=2, keepdims=True)
        np.testing.assert_array_equal(found.spans(share), within.argmax(axis=2) + 1)
    mean = given @ np.arange(28) / given.sum(axis=2)
    np.testing.assert_allclose(found.mean_distances(), mean, rtol=1e-6)


@pytest.mark.parametrize("form", ["memory", "same length", "vanilla"])
def test_attention_at_the_end_of_a_text(form: str, ids: np.ndarray) -> None:
    found = attention_at(model(form), ids, 5)
    assert found.shape[:3] == (2, 2, 5)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 2, 5))


def test_a_model_without_attention_is_refused_in_a_sentence(ids: np.ndarray) -> None:
    recurrent = build("lstm", {"vocabulary": 30, "width": 16})
    for ask in (lambda: attention_by_distance(recurrent, ids), lambda: attention_at(recurrent, ids, 4)):
        with pytest.raises(ConfigError, match="drawn for transformer-xl and vanilla"):
            ask()


def test_memory_does_not_grow_with_the_text(ids: np.ndarray) -> None:
    """Ten times the text, the same largest tensor."""
    net, largest = model("memory"), []
    softmax = under_test.softmax_seen

    def watched(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        largest.append(scores.numel())
        return softmax(scores, seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "softmax_seen", watched)
        attention_by_distance(net, ids)
        short = max(largest)
        attention_by_distance(net, np.tile(ids, 10))
    assert max(largest) == short == 2 * 8 * 28
