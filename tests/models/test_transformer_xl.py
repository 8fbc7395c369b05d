"""What is Transformer-XL's own, beyond the contract."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from longspan.config import keys
from longspan.contract import State
from longspan.errors import ConfigError, UnknownNameError
from longspan.models.families import FAMILIES, build, name_of
from longspan.training.optimizers import hidden_matrices

SMALL = {"vocabulary": 11, "layers": 2, "width": 8, "heads": 2, "segment": 4, "memory": 6}


def test_gradients_reach_the_projections_through_memory_but_not_the_past() -> None:
    """The stop-gradient is on the hidden state only: Wk and Wv are trained by what they make of the memory."""
    model = build("transformer-xl", SMALL | {"dropout": 0.0}).double()
    tokens = torch.randint(11, (1, 9))
    _, state = model.losses(tokens[:, :4], tokens[:, 1:5])
    assert all(not t.requires_grad for t in state.parts["hidden"])
    losses, _ = model.losses(tokens[:, 4:5], tokens[:, 5:6], state)
    losses.sum().backward()
    embedding_rows = model.embedding.tables[0].grad.abs().sum(1)
    with_memory = model.layers[0].attention.value.weight.grad.clone()
    model.zero_grad()
    losses, _ = model.losses(tokens[:, 4:5], tokens[:, 5:6], model.initial_state(1))
    losses.sum().backward()
    assert (with_memory - model.layers[0].attention.value.weight.grad).abs().max() > 1e-9
    assert embedding_rows.isfinite().all()


def test_an_empty_memory_of_full_size_is_an_empty_memory() -> None:
    """A training step may keep its shapes from the first segment on: positions beyond `length` are not attended to."""
    model = build("transformer-xl", SMALL | {"dropout": 0.0}).double()
    tokens = torch.randint(11, (2, 5))
    empty = model.initial_state(2)
    noise = tuple(torch.randn(2, 6, 8, dtype=torch.float64) for _ in range(2))
    full = type(empty)(empty.length, {"hidden": noise})
    a, after_a = model.losses(tokens[:, :-1], tokens[:, 1:], empty)
    b, after_b = model.losses(tokens[:, :-1], tokens[:, 1:], full)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.equal(after_a.length, after_b.length)


@pytest.mark.parametrize("memory", [3, 6], ids=["segment fills it", "segment does not"])
def test_a_memory_known_to_be_whole_is_not_masked_and_reads_the_same(memory: int) -> None:
    model = build("transformer-xl", SMALL | {"memory": memory, "dropout": 0.0}).double().eval()
    tokens = torch.randint(11, (2, 41))
    known = model.initial_state(2)
    for at in range(0, 40, 4):
        asked = (tokens[:, at : at + 4], tokens[:, at + 1 : at + 5])
        losses, after = model.losses(*asked, known)
        masked, _ = model.losses(*asked, replace(known, whole=False))
        assert known.whole
        assert torch.equal(known.length, torch.full((2,), min(at, memory)))
        torch.testing.assert_close(losses, masked, rtol=0, atol=1e-12)
        known = after


def test_whether_a_memory_is_whole_is_known_only_where_it_is_so() -> None:
    model = build("transformer-xl", SMALL | {"dropout": 0.0}).eval()
    tokens, starts = torch.randint(11, (2, 8)), torch.zeros(2, 4, dtype=torch.bool)
    starts[0, 2] = True
    _, read = model.hidden_states(tokens[:, :4])
    assert read.whole
    assert State.from_tensors(read.tensors()).whole
    assert not read.reset(torch.tensor([True, False])).whole
    assert not State.from_tensors(read.reset(torch.tensor([True, False])).tensors()).whole
    _, begun = model.hidden_states(tokens[:, 4:], read, starts)
    assert not begun.whole
    _, later = model.hidden_states(tokens[:, :4], begun)
    assert not later.whole
    _, full = model.hidden_states(tokens, begun)  # eight positions, of which six are kept
    assert full.whole
    assert full.length.tolist() == [6, 6]


def test_dropout_acts_in_training_only() -> None:
    model = build("transformer-xl", SMALL | {"dropout": 0.5, "attention_dropout": 0.5})
    tokens = torch.randint(11, (2, 5))
    draw = lambda: model.losses(tokens[:, :-1], tokens[:, 1:], model.initial_state(2))[0]  # noqa: E731
    assert not torch.equal(draw(), draw())
    model.eval()
    assert torch.equal(draw(), draw())


def test_shared_biases_are_one_pair_and_own_ones_a_pair_per_layer() -> None:
    shared, own = build("transformer-xl", SMALL), build("transformer-xl", SMALL | {"shared_biases": False})
    count = lambda m: sum(p.numel() for n, p in m.named_parameters() if n.split(".")[-1] in ("u", "w"))  # noqa: E731
    assert (count(shared), count(own)) == (2 * 8, 2 * 2 * 8)


@torch.no_grad()
def test_a_convolution_mixes_what_every_layer_reads_and_remembers() -> None:
    """Over three segments, written out as one conv1d over the stream in front of each layer."""
    model = build("transformer-xl", SMALL | {"memory": 12, "convolution": 3}).double().eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    tokens, state, pieces = torch.randint(11, (2, 12)), model.initial_state(2, projected=False), []
    for piece in tokens.split(4, dim=1):
        hidden, state = model.hidden_states(piece, state)
        pieces.append(hidden)
    found = [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]
    h = model.embedding(tokens)
    for n, layer in enumerate(model.layers):
        taps = torch.cat([model.convolutions[n].weight.flip(0), torch.ones(1, 8)])  # the input itself counts once
        mixed = F.conv1d(F.pad(h.transpose(1, 2), (3, 0)), taps.t()[:, None], groups=8).transpose(1, 2)
        torch.testing.assert_close(found[n], mixed, rtol=0, atol=1e-12)
        torch.testing.assert_close(state.parts["hidden"][n], mixed, rtol=0, atol=1e-12)
        torch.testing.assert_close(state.parts["tails"][n], h[:, -3:], rtol=0, atol=1e-12)
        h = layer(mixed, *layer.keys_values(mixed), model.positions(12)(layer), None, None)
    torch.testing.assert_close(found[-1], h, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_decoder_begins_right_after_a_document_has() -> None:
    """Its tails hold nothing of the document before, though the last tokens read were that one's."""
    model = build("transformer-xl", SMALL | {"memory": 6, "convolution": 3}).double().eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    tokens, starts = torch.randint(11, (2, 8)), torch.zeros(2, 5, dtype=torch.bool)
    starts[:, 4] = True
    _, state = model.hidden_states(tokens[:, :5], starts=starts)
    alone, _ = model(tokens[:, 4:])
    decoder = model.decoder(state)
    for place in range(5, 8):
        torch.testing.assert_close(decoder.step(tokens[:, place]), alone[:, place - 4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["transformer-xl", "rotary", "vanilla"])
def test_a_convolution_costs_a_number_per_tap_unit_and_layer(family: str) -> None:
    values = {key: value for key, value in SMALL.items() if key in keys(FAMILIES[family].Config)}
    plain, mixed = (build(family, values | {"convolution": taps}) for taps in (0, 3))
    assert mixed.parameter_count - plain.parameter_count == 2 * 3 * 8
    assert mixed.state_size - plain.state_size == (2 * 3 * 8 if mixed.has_memory else 0)
    assert hidden_matrices(mixed) == hidden_matrices(plain)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"convolution": 7}, "memory=6 is shorter than the 7 positions model.convolution takes in; use 7 or more"),
        ({"convolution": -1}, "convolution=-1 must not be negative"),
        ({"width": 17}, "width=17 is not divisible by heads=2; try 16 or 18"),
        ({"memory": 0, "same_length": True}, "leaves it none"),
        ({"memory": -1}, "must not be negative"),
        ({"clamp": -3}, "must not be negative"),
        ({"dropout": 1.0}, r"must lie in \[0, 1\)"),
        ({"layers": 0}, "at least 1"),
        ({"cutoffs": [5, 4]}, "must rise"),
        ({"cutoffs": [5, 11]}, "must rise"),
        ({"cutoffs": [2, 4, 6, 8], "div_val": 4}, "no width"),
        ({"layers": 2.5}, "a whole number"),
        ({"layers": True}, "a whole number"),
        ({"norm": "pree"}, "did you mean 'pre'"),
        ({"same_length": "yes"}, "true or false"),
        ({"cutoffs": 5}, "a list of a whole number"),
        ({"memroy": 5}, "did you mean 'model.memory'"),
    ],
)
def test_a_config_that_cannot_be_says_why(values: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build("transformer-xl", SMALL | values)


def test_families_are_found_by_name() -> None:
    for name, cls in FAMILIES.items():
        values = {key: value for key, value in SMALL.items() if key in keys(cls.Config) and key != "memory"}
        assert name_of(build(name, values)) == name
    with pytest.raises(UnknownNameError, match="did you mean 'transformer-xl'"):
        build("transformerxl", {})
