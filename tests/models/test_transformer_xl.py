"""Transformer-XL: properties of the paper's model beyond the contract, and the errors of its config."""

from dataclasses import replace

import pytest
import torch

from longspan import config
from longspan.cache import Memory
from longspan.checkpoints.states import restore_state
from longspan.config import keys
from longspan.errors import ConfigError, StateError, UnknownNameError
from longspan.models.families import family, known_families, name_of
from longspan.reading import Reading
from tests.support import READING, build

SMALL = {"vocabulary": 11, "layers": 2, "width": 8, "heads": 2, "segment": 4, "memory": 6}
# Each key of the config, and its name in the authors' PyTorch code (train.py and mem_transformer.py).
AUTHORS_NAMES = {
    "vocabulary": "n_token",
    "layers": "n_layer",
    "width": "d_model",
    "heads": "n_head",
    "head_width": "d_head",
    "inner": "d_inner",
    "dropout": "dropout",
    "attention_dropout": "dropatt",
    "norm": "pre_lnorm",
    "shared_biases": "untie_r",
    "embedding_width": "d_embed",
    "cutoffs": "cutoffs",
    "div_val": "div_val",
    "tie_embedding": "tie_weight",
    "tie_projections": "tie_projs",
}


def test_config_has_only_keys_of_the_paper_and_the_authors_code() -> None:
    found = set(keys(family("transformer-xl").Config))
    assert found == set(AUTHORS_NAMES)
    assert len(found) <= 24


def test_gradients_reach_the_projections_through_memory_but_stop_at_the_hidden_states() -> None:
    """The stop-gradient is on the cached hidden states only: Wk and Wv get gradients from their use on the memory."""
    model = build("transformer-xl", SMALL | {"dropout": 0.0}).double()
    tokens = torch.randint(11, (1, 9))
    _, state = model.losses(tokens[:, :4], tokens[:, 1:5])
    assert all(isinstance(cache, Memory) and not cache.hidden.requires_grad for cache in state.caches)
    losses, _ = model.losses(tokens[:, 4:5], tokens[:, 5:6], state)
    losses.sum().backward()
    embedding_rows = model.embedding.tables[0].grad.abs().sum(1)
    with_memory = model.layers[0].value.weight.grad.clone()
    model.zero_grad()
    losses, _ = model.losses(tokens[:, 4:5], tokens[:, 5:6], model.initial_state(1))
    losses.sum().backward()
    assert (with_memory - model.layers[0].value.weight.grad).abs().max() > 1e-9
    assert embedding_rows.isfinite().all()


def test_invalid_positions_of_a_full_size_memory_are_not_attended_to() -> None:
    """Training can keep its shapes fixed from the first segment on: positions beyond `length` are masked."""
    model = build("transformer-xl", SMALL | {"dropout": 0.0}).double()
    tokens = torch.randint(11, (2, 5))
    empty, filled = model.initial_state(2), model.initial_state(2, filled=True)
    assert [cache.positions for cache in filled.caches] == [6, 6]
    noise = filled.map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)
    a, after_a = model.losses(tokens[:, :-1], tokens[:, 1:], empty)
    b, after_b = model.losses(tokens[:, :-1], tokens[:, 1:], noise)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.equal(after_a.length, after_b.length)


@pytest.mark.parametrize("memory", [3, 6], ids=["segment fills memory", "segment is shorter"])
def test_a_full_state_gives_the_same_losses_without_a_mask(memory: int) -> None:
    model = build("transformer-xl", SMALL | {"memory": memory, "dropout": 0.0}).double().eval()
    tokens = torch.randint(11, (2, 41))
    state = model.initial_state(2)
    for at in range(0, 40, 4):
        segment = (tokens[:, at : at + 4], tokens[:, at + 1 : at + 5])
        losses, after = model.losses(*segment, state)
        masked, _ = model.losses(*segment, replace(state, full=False))
        assert state.full
        assert torch.equal(state.length, torch.full((2,), min(at, memory)))
        torch.testing.assert_close(losses, masked, rtol=0, atol=1e-12)
        state = after


def test_a_state_is_marked_full_only_when_all_positions_are_valid() -> None:
    model = build("transformer-xl", SMALL | {"dropout": 0.0}).eval()
    tokens, starts = torch.randint(11, (2, 8)), torch.zeros(2, 4, dtype=torch.bool)
    starts[0, 2] = True
    _, first = model.hidden_states(tokens[:, :4])
    assert first.full
    one_reset = first.reset(torch.tensor([True, False]))
    assert not one_reset.full
    assert not restore_state(model, one_reset.tensors(), one_reset.reading).full
    _, with_start = model.hidden_states(tokens[:, 4:], first, starts)
    assert not with_start.full
    _, later = model.hidden_states(tokens[:, :4], with_start)
    assert not later.full
    _, refilled = model.hidden_states(tokens, with_start)  # eight positions, of which six are kept
    assert refilled.full
    assert refilled.length.tolist() == [6, 6]


def test_dropout_is_active_in_training_only() -> None:
    model = build("transformer-xl", SMALL | {"dropout": 0.5, "attention_dropout": 0.5})
    tokens = torch.randint(11, (2, 5))
    draw = lambda: model.losses(tokens[:, :-1], tokens[:, 1:], model.initial_state(2))[0]  # noqa: E731
    assert not torch.equal(draw(), draw())
    model.eval()
    assert torch.equal(draw(), draw())


def test_shared_biases_are_one_pair_and_unshared_ones_a_pair_per_layer() -> None:
    shared, own = build("transformer-xl", SMALL), build("transformer-xl", SMALL | {"shared_biases": False})
    count = lambda m: sum(p.numel() for n, p in m.named_parameters() if n.split(".")[-1] in ("u", "w"))  # noqa: E731
    assert (count(shared), count(own)) == (2 * 8, 2 * 2 * 8)


@pytest.mark.parametrize("name", ["transformer-xl", "longspan-xl"])
def test_a_state_of_another_depth_is_refused(name: str) -> None:
    shallow, deep = (build(name, SMALL | {"layers": layers}) for layers in (2, 3))
    tokens = torch.randint(11, (1, 4))
    with pytest.raises(StateError, match=r"3 caches.*2 layers"):
        shallow(tokens, deep.initial_state(1))
    with pytest.raises(StateError, match=r"2 caches.*3 layers"):
        deep(tokens, shallow.initial_state(1))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"width": 17}, r"width=17.*heads=2.*16 or 18"),
        ({"memory": 0, "same_length": True}, r"same_length=true.*memory"),
        ({"memory": -1}, r"memory=-1.* 0 "),
        ({"clamp": -3}, r"clamp=-3.* 0 "),
        ({"dropout": 1.0}, r"model\.dropout=1\.0.*\[0, 1\)"),
        ({"layers": 0}, r"model\.layers=0.* 1"),
        ({"cutoffs": [5, 4]}, r"model\.cutoffs=\[5, 4\].*11"),
        ({"cutoffs": [5, 11]}, r"model\.cutoffs=\[5, 11\].*11"),
        ({"cutoffs": [2, 4, 6, 8], "div_val": 4}, r"model\.div_val=4.*5 clusters"),
        ({"layers": 2.5}, r"model\.layers=2\.5"),
        ({"layers": True}, r"model\.layers=true"),
        ({"norm": "pree"}, r"model\.norm.*'pree'.*'pre'"),
        ({"cutoffs": 5}, r"model\.cutoffs=5"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("transformer-xl", SMALL | values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"same_length": "yes"}, r"reading\.same_length=.yes.*true or false"),
        ({"memroy": 5}, r"'reading\.memroy'.*'reading\.memory'"),
    ],
)
def test_an_invalid_reading_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config.build(Reading, values, "reading")


@pytest.mark.parametrize("key", ["memory", "convolution", "pointer_width", "final_norm", "activation", "position"])
def test_settings_of_the_reading_and_of_longspan_xl_are_unknown_keys(key: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"'model\.{key}'"):
        config.build(family("transformer-xl").Config, {key: 0}, "model")


def test_families_are_found_by_name() -> None:
    for name in known_families():
        known = {*keys(family(name).Config), *READING} - {"memory"}
        assert name_of(build(name, {key: value for key, value in SMALL.items() if key in known})) == name
    with pytest.raises(UnknownNameError, match=r"'transformerxl'.*'transformer-xl'"):
        build("transformerxl", {})
