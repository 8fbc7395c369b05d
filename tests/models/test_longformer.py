"""Longformer: its windows, measured by their influence, and Transformer-XL as the special case of a wide window."""

import pytest
import torch

from longspan.decoding.open import open_decoder
from longspan.errors import ConfigError
from longspan.models.families import state_bytes
from tests.models.paper import PAPER, load_paper_weights, paper_name
from tests.support import build

from .influence import compose, farthest, influence, visibility, wide_model


def window(w: int, d: int, causal: bool, n: int = 30):
    far = range(w) if causal else range(-(w // 2), w // 2 + 1)
    return lambda i: {i - d * k for k in far} & set(range(n))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_influence_follows_the_window_of_each_layer_and_the_dilation_of_each_head(causal: bool) -> None:
    """Beltagy et al. 2020, section 3.1: the window doubles, and one head of the second layer is dilated."""
    model = wide_model("longformer", {"layers": 2, "window": [3, 6], "dilation": [[1], [1, 3]], "causal": causal})
    low = visibility(window(3, 1, causal), 30)
    high = visibility(window(6, 1, causal), 30) | visibility(window(6, 3, causal), 30)
    found = influence(model, 30)
    assert torch.equal(found, compose(low, high))
    if causal:
        assert model.reach() == farthest(found) == 2 + 15


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_global_tokens_attend_to_all_and_all_attend_to_them(causal: bool) -> None:
    """Each document has its own; a causal model sees no later token through them either."""
    model = wide_model("longformer", {"window": 3, "global_tokens": 2, "causal": causal})
    starts = torch.zeros(1, 30, dtype=torch.bool)
    starts[0, 11] = True
    expected = torch.zeros(30, 30, dtype=torch.bool)
    for begin, end in ((0, 11), (11, 30)):
        near = window(3, 1, causal, end - begin)
        for i in range(end - begin):
            seen = set(range(end - begin)) if i < 2 else near(i) | {0, 1}
            expected[begin + i, [begin + j for j in seen if j <= i or not causal]] = True
    assert torch.equal(influence(model, 30, starts), expected)


def test_global_tokens_have_their_own_projections() -> None:
    """Section 3.1: with one layer, the output of a position depends on one set of projections and not on the other."""
    model = wide_model("longformer", {"window": 3, "global_tokens": 2})
    layer = model.layers[0]
    own = [layer.global_query.weight, layer.global_key.weight, layer.global_value.weight]
    usual = [layer.attention.query.weight, layer.attention.key.weight, layer.attention.value.weight]
    hidden, _ = model.hidden_states(torch.arange(30)[None] % 11)
    for place in (1, 2, 20):
        used, unused = (own, usual) if place < 2 else (usual, own)
        gradients = torch.autograd.grad(hidden[-1][0, place, 0], [*used, *unused], retain_graph=True)
        assert all(float(g.abs().max()) > 0 for g in gradients[:3])
        assert all(float(g.abs().max()) == 0 for g in gradients[3:])


def same_weights(longformer: dict, transformer_xl: dict, **shared) -> tuple:
    a, b = wide_model("longformer", shared | longformer), wide_model("transformer-xl", shared | transformer_xl)
    assert load_paper_weights(a, b) == []
    return a, b


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_window_as_long_as_the_segment_is_transformer_xl_without_memory(norm: str) -> None:
    a, b = same_weights({"window": 30}, {"memory": 0}, norm=norm, layers=2)
    assert_equal(a, b)


def test_a_window_as_long_as_the_segment_is_longspan_xl_with_a_final_norm() -> None:
    values = {"norm": "pre", "final_norm": True, "layers": 2}
    a = wide_model("longformer", values | {"window": 30})
    b = wide_model("longspan-xl", PAPER | values | {"memory": 0})
    b.load_state_dict(a.state_dict())
    assert_equal(a, b)


def assert_equal(a, b) -> None:
    """Hidden states and gradients agree."""
    tokens = torch.randint(11, (2, 30))
    for x, y in zip(a.hidden_states(tokens)[0], b.hidden_states(tokens)[0], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)
    for model in (a, b):
        model.losses(tokens[:, :-1], tokens[:, 1:])[0].sum().backward()
    others = dict(b.named_parameters())
    for name, p in a.named_parameters():
        q = others.pop(name if name in others else paper_name(name))
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-9, msg=name)
    assert not others


@pytest.mark.parametrize("trainable", [False, True], ids=["key-value cache", "hidden states"])
def test_a_window_with_memory_is_transformer_xl_with_same_length(trainable: bool) -> None:
    """Losses and cache lengths of a stream in unequal segments, one of which contains a document start."""
    a, b = same_weights({"window": 6, "memory": 5}, {"memory": 6, "same_length": True}, layers=2)
    tokens, starts = torch.randint(11, (2, 31)), torch.zeros(2, 30, dtype=torch.bool)
    starts[1, 14] = True
    states = [model.initial_state(2, trainable=trainable) for model in (a, b)]
    for begin, end in ((0, 4), (4, 5), (5, 17), (17, 30)):
        piece = slice(begin, end)
        found = []
        for k, model in enumerate((a, b)):
            losses, states[k] = model.losses(
                tokens[:, piece], tokens[:, begin + 1 : end + 1], states[k], starts[:, piece]
            )
            found.append(losses)
        torch.testing.assert_close(*found, rtol=0, atol=1e-11)
    assert states[0].length.tolist() == [5, 5]


def test_each_layer_caches_its_own_window_and_reach_is_their_sum() -> None:
    model = wide_model("longformer", {"layers": 3, "window": [2, 5, 3], "dilation": [[1], [1], [1, 4]], "memory": 9})
    tokens = torch.randint(11, (1, 60))
    assert model.reach() == 1 + 4 + 8
    assert state_bytes(model) == 8 + 8 * 2 * 8 * (1 + 4 + 8)
    _, state = model.losses(tokens[:, :-1], tokens[:, 1:])
    assert [cache.keys.shape[2] for cache in state.caches] == [1, 4, 8]
    for lag, moved in ((13, True), (14, False)):
        changed = tokens.clone()
        changed[0, 58 - lag] = (changed[0, 58 - lag] + 1) % 11
        both, carried = [], [model.initial_state(2)]
        for piece in torch.cat([tokens, changed])[:, :59].split(7, dim=1):
            hidden, state = model.hidden_states(piece, carried[-1])
            carried.append(state)
        both = hidden[-1][:, -1]
        assert bool((both[0] != both[1]).any()) == moved


def test_invalid_positions_of_a_full_size_cache_are_not_attended_to() -> None:
    model = wide_model("longformer", {"layers": 2, "window": [3, 5], "memory": 4})
    tokens = torch.randint(11, (2, 9))
    filled = model.initial_state(2, filled=True)
    assert [cache.keys.shape[2] for cache in filled.caches] == [2, 4]
    noise = filled.map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)
    a, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
    b, after = model.losses(tokens[:, :-1], tokens[:, 1:], noise)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert after.length.tolist() == [4, 4]


def test_a_bidirectional_model_does_not_predict_the_next_token() -> None:
    model, tokens = wide_model("longformer", {"causal": False}), torch.randint(11, (1, 5))
    assert (model.causal, model.predicts_next) == (False, False)
    causal = wide_model("longformer", {})
    assert (causal.causal, causal.predicts_next) == (True, True)
    calls = (
        lambda: model.losses(tokens, tokens),
        lambda: model.training_loss(tokens, tokens),
        lambda: model(tokens),
        lambda: open_decoder(model).step(tokens[:, 0]),
    )
    for predict in calls:
        with pytest.raises(ConfigError, match=r"model\.causal=false.*hidden_states"):
            predict()
    hidden, _ = model.hidden_states(tokens)
    assert hidden[-1].shape == (1, 5, 8)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"layers": 3, "window": [4, 4]}, r"model\.window has 2 .*3 layers.*1 or 3"),
        ({"dilation": [[1, 2, 3]]}, r"model\.dilation has 3 .*4 heads.*1 or 4"),
        ({"window": 0}, r"model\.window=0.* 1"),
        ({"dilation": [[]]}, r"model\.dilation has 0 .*4 heads"),
        ({"global_tokens": -1}, r"model\.global_tokens=-1"),
        ({"window": 9, "dilation": 2, "memory": 8}, r"memory=8.*16"),
        ({"memory": 31, "global_tokens": 1}, r"memory=31.*model\.global_tokens=1"),
        ({"memory": 31, "causal": False}, r"memory=31.*model\.causal"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("longformer", values)
