"""What is Longformer's own: its windows felt through the whole model, and Transformer-XL where the two meet."""

import pytest
import torch

from longspan.contract import State
from longspan.errors import ConfigError
from longspan.models.families import build

from .felt import farthest, felt, hops, sets, wide


def window(w: int, d: int, causal: bool, n: int = 30):
    far = range(w) if causal else range(-(w // 2), w // 2 + 1)
    return lambda i: {i - d * k for k in far} & set(range(n))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_a_model_feels_a_window_per_layer_and_a_dilation_per_head(causal: bool) -> None:
    """Beltagy et al. 2020, section 3.1: the window doubles, and one head of the second layer is dilated."""
    model = wide("longformer", {"layers": 2, "window": [3, 6], "dilation": [[1], [1, 3]], "causal": causal})
    low = sets(window(3, 1, causal), 30)
    high = sets(window(6, 1, causal), 30) | sets(window(6, 3, causal), 30)
    found = felt(model, 30)
    assert torch.equal(found, hops(low, high))
    if causal:
        assert model.reach == farthest(found) == 2 + 15


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_global_tokens_see_all_and_all_see_them(causal: bool) -> None:
    """Each document has its own; in language modelling neither sees what comes later."""
    model = wide("longformer", {"window": 3, "global_tokens": 2, "causal": causal})
    starts = torch.zeros(1, 30, dtype=torch.bool)
    starts[0, 11] = True
    expected = torch.zeros(30, 30, dtype=torch.bool)
    for begin, end in ((0, 11), (11, 30)):
        near = window(3, 1, causal, end - begin)
        for i in range(end - begin):
            seen = set(range(end - begin)) if i < 2 else near(i) | {0, 1}
            expected[begin + i, [begin + j for j in seen if j <= i or not causal]] = True
    assert torch.equal(felt(model, 30, starts), expected)


def test_global_tokens_look_through_projections_of_their_own() -> None:
    """Section 3.1: with one layer, what a position reads depends on one set of projections and not on the other."""
    model = wide("longformer", {"window": 3, "global_tokens": 2})
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
    a, b = wide("longformer", shared | longformer), wide("transformer-xl", shared | transformer_xl)
    b.load_state_dict(a.state_dict())
    return a, b


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_window_over_the_whole_segment_is_transformer_xl_without_memory(norm: str) -> None:
    a, b = same_weights({"window": 30}, {"memory": 0}, norm=norm, layers=2, final_norm=norm == "pre")
    tokens = torch.randint(11, (2, 30))
    for x, y in zip(a.hidden_states(tokens)[0], b.hidden_states(tokens)[0], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)
    for model in (a, b):
        model.losses(tokens[:, :-1], tokens[:, 1:])[0].sum().backward()
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("projected", [True, False], ids=["projected", "hidden"])
def test_a_remembered_window_is_transformer_xl_with_same_length(projected: bool) -> None:
    """Streamed in unequal pieces, with a document that begins in one: losses, and lengths of memory."""
    a, b = same_weights({"window": 6, "memory": 5}, {"memory": 6, "same_length": True}, layers=2)
    tokens, starts = torch.randint(11, (2, 31)), torch.zeros(2, 30, dtype=torch.bool)
    starts[1, 14] = True
    states = [model.initial_state(2, projected=projected) for model in (a, b)]
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


def test_each_layer_remembers_its_own_window_and_reach_is_their_sum() -> None:
    model = wide("longformer", {"layers": 3, "window": [2, 5, 3], "dilation": [[1], [1], [1, 4]], "memory": 9})
    tokens = torch.randint(11, (1, 60))
    assert model.reach == 1 + 4 + 8
    assert model.state_size == 2 * 8 * (1 + 4 + 8)
    _, state = model.losses(tokens[:, :-1], tokens[:, 1:])
    assert [keys.shape[2] for keys in state.parts["keys"]] == [1, 4, 8]
    for lag, moved in ((13, True), (14, False)):
        changed = tokens.clone()
        changed[0, 58 - lag] = (changed[0, 58 - lag] + 1) % 11
        both, carried = [], [model.initial_state(2)]
        for piece in torch.cat([tokens, changed])[:, :59].split(7, dim=1):
            hidden, state = model.hidden_states(piece, carried[-1])
            carried.append(state)
        both = hidden[-1][:, -1]
        assert bool((both[0] != both[1]).any()) == moved


def test_a_memory_of_full_size_with_nothing_in_it_is_empty() -> None:
    model = wide("longformer", {"layers": 2, "window": [3, 5], "memory": 4})
    tokens = torch.randint(11, (2, 9))
    noise = {name: tuple(torch.randn(2, 2, n, 4).double() for n in (2, 4)) for name in ("keys", "values")}
    full = State(torch.zeros(2, dtype=torch.int64), noise)
    a, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
    b, after = model.losses(tokens[:, :-1], tokens[:, 1:], full)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert after.length.tolist() == [4, 4]


def test_an_encoder_is_not_scored_as_a_language_model() -> None:
    model, tokens = wide("longformer", {"causal": False}), torch.randint(11, (1, 5))
    for act in (lambda: model.losses(tokens, tokens), lambda: model.training_loss(tokens, tokens), model.decoder):
        with pytest.raises(ConfigError, match=r"reads both ways .* has seen the next token"):
            act()
    assert model(tokens)[0].shape == (1, 5, 11)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"layers": 3, "window": [4, 4]}, "window has 2 entries for 3 layers; give 1 or 3"),
        ({"dilation": [[1, 2, 3]]}, "dilation has 3 numbers for 4 heads; give 1 or 4"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"dilation": [[]]}, "dilation has 0 numbers for 4 heads"),
        ({"global_tokens": -1}, "must not be negative"),
        ({"window": 9, "dilation": 2, "memory": 8}, "shorter than the farthest distance its windows reach, 16; use 16"),
        ({"memory": 31, "global_tokens": 1}, "turn one off"),
        ({"memory": 31, "causal": False}, "turn one off"),
    ],
)
def test_a_config_that_cannot_be_says_why(values: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build("longformer", values)
