"""What keeps a remembering family from learning a small text by heart: each part against what it says it is."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.models.families import build
from longspan.training.dropout import lock_dropout
from tests.models.test_awd_lstm import by_hand

SMALL = {"vocabulary": 40, "layers": 2, "width": 24, "heads": 2, "segment": 9, "memory": 9, "dropout": 0.0}
ALL = {
    "dropout": 0.2,
    "attention_dropout": 0.2,
    "embedding_dropout": 0.2,
    "input_dropout": 0.6,
    "output_dropout": 0.5,
    "projection_dropout": 0.2,
    "ar": 0.2,
    "tar": 0.1,
}
FAMILIES = ["transformer-xl", "rotary"]


def make(family: str = "transformer-xl", *, locked: bool = True, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    model = build(family, SMALL | changes).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    if locked:
        lock_dropout(model)
    return model


def text(rows: int = 3, count: int = 9) -> torch.Tensor:
    return torch.randint(40, (rows, count), generator=torch.Generator().manual_seed(rows + count))


def watch(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].detach(), output.detach())))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(("key", "n"), [("input_dropout", 0), ("output_dropout", -1)])
def test_the_ends_are_dropped_at_their_own_rate_and_nothing_else(family: str, locked: bool, key: str, n: int) -> None:
    model, tokens = make(family, locked=locked, **{key: 0.4}), text()
    seen = watch(getattr(model, key))
    hidden, _ = model.hidden_states(tokens)
    rows = [(before, after) for before, after in seen if before.dim() == 3]
    assert len(rows) == 1
    before, after = rows[0]
    assert torch.equal(hidden[n], after)
    if key == "input_dropout":
        torch.testing.assert_close(before, model.embedding.tables[0][tokens].detach() * 24**0.5)
    else:
        plain, _ = make(family).hidden_states(tokens)
        torch.testing.assert_close(before, plain[-1].detach(), rtol=0, atol=1e-12)
    mask = after / before
    assert torch.allclose(mask[mask != 0], torch.tensor(1 / 0.6, dtype=mask.dtype))
    assert 0.2 < (mask == 0).double().mean() < 0.6
    assert (mask.isclose(mask[:, :1]).all().item()) is locked, "locked masks hold for all positions, others do not"
    assert not torch.equal(mask[0, 0] == 0, mask[1, 0] == 0)


def test_a_distance_loses_the_same_units_as_every_other() -> None:
    model = make(input_dropout=0.5)
    seen = watch(model.input_dropout)
    model.hidden_states(text())
    _, (sinusoids, dropped) = seen
    assert sinusoids.shape == (9, 24)
    lost = (dropped == 0) & (sinusoids != 0)
    assert 0.2 < lost[-2].double().mean() < 0.8
    assert torch.equal(dropped, torch.where(dropped[-2] == 0, 0.0, 2 * sinusoids))


@pytest.mark.parametrize("family", FAMILIES)
def test_words_are_dropped_wherever_they_stand_and_whole_in_the_softmax(family: str) -> None:
    model, tokens = make(family, embedding_dropout=0.3), text(4, 60)
    hidden, _ = model.hidden_states(tokens)
    rows = model.embedding.tables[0].detach() * 24**0.5
    blank = torch.tensor([0.0, 1.0] * 12, dtype=rows.dtype)
    for word in tokens.unique():
        here = hidden[0][tokens == word]
        assert torch.equal(here, blank.expand_as(here)) or torch.allclose(here, rows[word] / 0.7)
    assert 0.05 < (hidden[0][..., 0] == 0).double().mean() < 0.6
    assert all(bool((table != 0).any(1).all()) for table in model.head.tables)


@pytest.mark.parametrize(("family", "norm"), [("transformer-xl", "post"), ("transformer-xl", "pre"), ("rotary", "pre")])
def test_a_dropped_first_word_leaves_gradients_as_large_as_a_whole_one_does(family: str, norm: str) -> None:
    """A first word sees nothing but itself: were it zeros, each of many norms would blow its gradient up."""
    norms = []
    for rate in (0.0, 0.7):
        torch.manual_seed(0)
        model = build(family, SMALL | {"layers": 14, "width": 64, "norm": norm, "embedding_dropout": rate}).train()
        model.training_loss(text(16), text(16).roll(-1, 1))[0].backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    assert norms[1] < 10 * norms[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_a_projection_is_dropping_rows_of_its_matrix(family: str) -> None:
    """With one row a locked mask is one for all positions, those of the memory too: a model whose matrices lost these
    rows says the same, gradients of what lies below included."""
    model, tokens = make(family, projection_dropout=0.4), text(1, 18)
    _, state = make(family).hidden_states(tokens[:, :9])
    other = copy.deepcopy(model)
    seen = [watch(layer.attention.projection_dropout) for layer in model.layers]
    hidden, after = model.hidden_states(tokens[:, 9:], state)
    for layer, (keys, values, queries) in zip(other.layers, seen, strict=True):
        attention = layer.attention
        attention.projection_dropout = nn.Identity()
        assert keys[0].shape[1] == 18, "the memory's keys are dropped with the segment's"
        for part, (before, dropped) in zip(
            (attention.key, attention.value, attention.query), (keys, values, queries), strict=True
        ):
            mask = (dropped / before)[0, 0]
            assert 0 < (mask == 0).double().mean() < 0.8
            with torch.no_grad():
                part.weight *= mask[:, None]
    expected, wanted = other.hidden_states(tokens[:, 9:], state)
    torch.testing.assert_close(hidden[-1], expected[-1], rtol=0, atol=1e-12)
    torch.testing.assert_close(after.tensors(), wanted.tensors(), rtol=0, atol=1e-12)
    grad = [
        torch.autograd.grad(h[-1].square().sum(), m.embedding.tables[0])
        for h, m in ((hidden, model), (expected, other))
    ]
    torch.testing.assert_close(*grad, rtol=0, atol=1e-9)


def test_the_memory_is_read_as_it_was_stored() -> None:
    model, tokens = make(**ALL), text(2, 18)
    hidden, state = model.hidden_states(tokens[:, :9])
    for n, stored in enumerate(state.parts["hidden"]):
        assert torch.equal(stored, hidden[n]), "what a layer read, dropped as it was"
    seen = [watch(layer.attention.key) for layer in model.layers]
    model.hidden_states(tokens[:, 9:], state)
    for stored, ((context, _),) in zip(state.parts["hidden"], seen, strict=True):
        assert torch.equal(context[:, :9], stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_it_acts_outside_of_training(family: str) -> None:
    model, plain, tokens = make(family, **ALL).eval(), make(family).eval(), text(2, 19)
    found, wanted = [], []
    for reader, losses in ((model, found), (plain, wanted)):
        state = None
        for part in (slice(0, 9), slice(9, 18)):
            loss, state = reader.losses(tokens[:, part], tokens[:, 1:][:, part], state)
            losses.append(loss)
    assert torch.equal(torch.cat(found), torch.cat(wanted))
    scored, _ = model.training_loss(tokens[:, :9], tokens[:, 1:10])
    torch.testing.assert_close(scored, found[0].mean())


def test_the_ends_are_as_dropout_unless_given() -> None:
    losses = []
    for given in ({}, {"input_dropout": 0.3, "output_dropout": 0.3}, {"output_dropout": 0.0}):
        model = make(locked=False, dropout=0.3, **given)
        torch.manual_seed(5)
        losses.append(model.training_loss(text(), text())[0].item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_penalties_are_what_a_hand_adds_up(family: str, documents: bool) -> None:
    model, tokens = make(family, output_dropout=0.5, ar=2.0, tar=0.7), text(2, 6)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[1, 4] = documents
    seen = watch(model.output_dropout)
    loss, state = model.training_loss(tokens, tokens.roll(-1, 1), None, 0.0, starts if documents else None)
    ((h, dropped),) = seen
    ar, tar = by_hand(h, dropped, starts)
    plain = model.head.losses(dropped, tokens.roll(-1, 1)).mean()
    assert (loss - plain).item() == pytest.approx(2.0 * ar + 0.7 * tar, abs=1e-9)
    assert state.batch == 2
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"embedding_dropout": 1.0}, r"model.embedding_dropout=1.0 must lie in \[0, 1\)"),
        ({"input_dropout": -0.1}, r"model.input_dropout=-0.1 must lie in \[0, 1\)"),
        ({"output_dropout": 1.5}, r"model.output_dropout=1.5"),
        ({"projection_dropout": 1.0}, r"model.projection_dropout=1.0 must lie in \[0, 1\)"),
        ({"ar": -1.0}, r"model.ar=-1.0 must not be negative; 0 turns it off"),
    ],
)
def test_a_bad_rate_is_told_in_a_sentence(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(**values)
