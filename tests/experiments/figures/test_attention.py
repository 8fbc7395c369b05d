"""Attention by distance, against the weights that the definition gives for the model's own kernel calls."""

from typing import Any

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.experiments.figures import attention as under_test
from longspan.experiments.figures.attention import (
    attention_by_distance,
    has_attention,
    last_attention,
    layer_attentions,
)
from longspan.kernels.relative_attention import reference
from longspan.models import transformer_xl
from longspan.models.families import known_families
from longspan.nn import attention as nn_attention
from tests.support import build

SMALL = {"vocabulary": 30, "layers": 2, "width": 16, "heads": 2, "inner": 16, "segment": 8, "dropout": 0.0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "memory": ("transformer-xl", {"memory": 20}),
    "same length": ("transformer-xl", {"memory": 20, "same_length": True}),
    "clamp": ("transformer-xl", {"memory": 20, "clamp": 5, "discount": 1.5}),
    "per layer": ("transformer-xl", {"memory": 20, "shared_biases": False, "norm": "pre"}),
    "longspan-xl": ("longspan-xl", {"memory": 20}),
    "shaw": ("longspan-xl", {"memory": 20, "position": "shaw", "max_distance": 9}),
    "convolution": ("longspan-xl", {"memory": 20, "convolution": 3, "norm": "post", "shared_biases": True}),
    "rotary": ("rotary", {"memory": 20}),
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


def reference_weights(query, key, *position, window=None, first_key=None, discount=0.0) -> torch.Tensor:
    """The attention weights [H, L, K] of the first row by the definition."""
    B, H, K, _ = key.shape
    zero = torch.zeros(H, query.shape[-1])
    r, u, w = position or (zero[:, None], zero, zero)
    # With unit vectors as values, the output of attention is its weights, as many columns at a time as a head is wide.
    width = query.shape[-1]
    units = torch.eye(K, -(-K // width) * width).expand(B, H, -1, -1).split(width, dim=-1)
    options = {"window": window, "first_key": first_key, "discount": discount}
    out = [reference.relative_attention(query, key, unit, r, u, w, **options) for unit in units]
    return torch.cat(out, dim=-1)[0, :, :, :K]


@pytest.fixture
def kernel_weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The reference weights of every attention call that a model makes, without the hook under test."""
    weights: list[torch.Tensor] = []
    kernels = ((transformer_xl, "relative_attention"), (nn_attention, "relative_attention"))
    for module, name in (*kernels, (nn_attention, "causal_attention")):

        def record(query, key, value, *position, kernel=getattr(module, name), dropout=0.0, **visible) -> torch.Tensor:
            weights.append(reference_weights(query, key, *position, **visible))
            return kernel(query, key, value, *position, dropout=dropout, **visible)

        monkeypatch.setattr(module, name, record)
    return weights


@pytest.mark.parametrize("form", FORMS)
def test_weights_equal_those_of_the_model(form: str, ids: np.ndarray, kernel_weights: list[torch.Tensor]) -> None:
    net = model(form)
    state = net.initial_state(1)
    for begin in range(0, 96, 8):
        segment = torch.from_numpy(ids[begin : begin + 8].astype(np.int64))[None]
        kernel_weights.clear()
        with torch.no_grad():
            layers, state = layer_attentions(net, segment, state)
        assert len(layers) == 2
        for by_distance, by_key in zip([layer.weights() for layer in layers], kernel_weights, strict=True):
            L, K = by_key.shape[1:]
            for i in range(L):
                backwards = by_key[:, i, : K - L + i + 1].flip(1)
                torch.testing.assert_close(by_distance[:, i, : K - L + i + 1], backwards, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_means_do_not_depend_on_the_block_size(form: str, ids: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(form)
    at_once = attention_by_distance(net, ids)
    monkeypatch.setattr(under_test, "_SCORES_AT_ONCE", 100)
    in_blocks = attention_by_distance(net, ids)
    np.testing.assert_allclose(in_blocks.attention, at_once.attention, atol=1e-7)
    four_terms = form in ("memory", "same length", "clamp", "per layer", "longspan-xl", "convolution")
    assert set(at_once.terms) == (set("abcd") if four_terms else set())
    for kind, means in at_once.terms.items():
        np.testing.assert_allclose(in_blocks.terms[kind], means, atol=1e-7)


def test_means_are_over_queries_with_a_full_memory(ids: np.ndarray) -> None:
    net = model("same length")
    found = attention_by_distance(net, ids)
    assert found.attention.shape == (2, 2, 20)
    assert found.queries == len(ids) - 24  # complete segments after the first 20 tokens
    np.testing.assert_allclose(found.attention.sum(axis=2), 1, atol=1e-6)
    for kind in "abcd":
        np.testing.assert_allclose(found.terms[kind].sum(axis=2), 1, atol=1e-6)


def test_text_shorter_than_the_memory(ids: np.ndarray) -> None:
    found = attention_by_distance(model("memory"), ids[:15])
    assert found.queries == 15
    assert found.attention.shape == (2, 2, 15)


def test_term_d_does_not_depend_on_the_text(ids: np.ndarray) -> None:
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
def test_spans_sum_over_queries(form: str, ids: np.ndarray) -> None:
    """Early queries of a segment see fewer tokens than late ones; spans are of their weights added up."""
    net = model(form)
    query = net.layers[0].query if form == "memory" else net.layers[0].attention.query
    query.weight.data.zero_()  # uniform attention, or by position alone
    total, state, warm_up = np.zeros((2, 2, 28)), net.initial_state(1), 20 if form == "memory" else 0
    for begin in range(0, len(ids), 8):
        with torch.no_grad():
            segment = torch.from_numpy(ids[begin : begin + 8].astype(np.int64))[None]
            layers, state = layer_attentions(net, segment, state)
            for n, layer in enumerate(layers):
                weights = layer.weights().double().sum(dim=1).numpy()
                total[n, :, : weights.shape[1]] += weights if begin >= warm_up else 0
    found = attention_by_distance(net, ids)
    for share in (0.5, 0.9):
        within = total.cumsum(axis=2) >= share * total.sum(axis=2, keepdims=True)
        np.testing.assert_array_equal(found.spans(share), within.argmax(axis=2) + 1)
    mean = total @ np.arange(28) / total.sum(axis=2)
    np.testing.assert_allclose(found.mean_distances(), mean, rtol=1e-6)


@pytest.mark.parametrize("form", ["memory", "same length", "vanilla"])
def test_attention_of_the_last_tokens(form: str, ids: np.ndarray) -> None:
    found = last_attention(model(form), ids, 5)
    assert found.shape[:3] == (2, 2, 5)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 2, 5))


def test_a_model_without_attention_is_refused(ids: np.ndarray) -> None:
    recurrent = build("lstm", {"vocabulary": 30, "width": 16})
    for call in (lambda: attention_by_distance(recurrent, ids), lambda: last_attention(recurrent, ids, 4)):
        with pytest.raises(ConfigError, match=r"LSTM.*transformer-xl.*vanilla"):
            call()


def test_families_with_one_key_per_token() -> None:
    """In the others a key's index does not give its distance: compressed keys, sparse patterns, repeated layers."""
    shape = {"vocabulary": 30, "layers": 2, "width": 16, "dropout": 0.0}
    found = {family for family in known_families() if has_attention(build(family, shape).eval())}
    assert found == {"transformer-xl", "longspan-xl", "vanilla", "rotary", "gpt"}


def test_memory_use_does_not_grow_with_the_text(ids: np.ndarray) -> None:
    """Ten times the text, the same largest tensor."""
    net, largest = model("memory"), []
    softmax = under_test.masked_softmax

    def watched(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        largest.append(scores.numel())
        return softmax(scores, visible)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "masked_softmax", watched)
        attention_by_distance(net, ids)
        short = max(largest)
        attention_by_distance(net, np.tile(ids, 10))
    assert max(largest) == short == 2 * 8 * 28
