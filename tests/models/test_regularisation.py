"""The regularisation of longspan-xl and rotary: dropout of words, ends and projections, and AR/TAR."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.training.dropout import lock_dropout
from tests.models.paper import PAPER
from tests.models.test_awd_lstm import penalties_by_element
from tests.support import build

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
OTHER_PARTS: dict[str, dict[str, Any]] = {"longspan-xl": PAPER, "rotary": {}}
"""The parts that are not tested here are off."""
FAMILIES = list(OTHER_PARTS)


def make(family: str = "longspan-xl", *, locked: bool = True, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    model = build(family, SMALL | OTHER_PARTS[family] | changes).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    if locked:
        lock_dropout(model)
    return model


def text(rows: int = 3, count: int = 9) -> torch.Tensor:
    return torch.randint(40, (rows, count), generator=torch.Generator().manual_seed(rows + count))


def record(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].detach(), output.detach())))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(("key", "n"), [("input_dropout", 0), ("output_dropout", -1)])
def test_input_and_output_are_dropped_at_their_own_rates(family: str, locked: bool, key: str, n: int) -> None:
    model, tokens = make(family, locked=locked, **{key: 0.4}), text()
    seen = record(getattr(model, key))
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
    assert (mask.isclose(mask[:, :1]).all().item()) is locked, "a locked mask is the same at all positions"
    assert not torch.equal(mask[0, 0] == 0, mask[1, 0] == 0)


def test_a_locked_mask_drops_the_same_units_of_all_distances() -> None:
    model = make(input_dropout=0.5)
    seen = record(model.input_dropout)
    model.hidden_states(text())
    _, (sinusoids, dropped) = seen
    assert sinusoids.shape == (9, 24)
    lost = (dropped == 0) & (sinusoids != 0)
    assert 0.2 < lost[-2].double().mean() < 0.8
    assert torch.equal(dropped, torch.where(dropped[-2] == 0, 0.0, 2 * sinusoids))


@pytest.mark.parametrize("family", FAMILIES)
def test_words_are_dropped_at_all_their_positions_and_kept_in_the_softmax(family: str) -> None:
    model, tokens = make(family, embedding_dropout=0.3), text(4, 60)
    hidden, _ = model.hidden_states(tokens)
    rows = model.embedding.tables[0].detach() * 24**0.5
    blank = torch.tensor([0.0, 1.0] * 12, dtype=rows.dtype)
    for word in tokens.unique():
        here = hidden[0][tokens == word]
        assert torch.equal(here, blank.expand_as(here)) or torch.allclose(here, rows[word] / 0.7)
    assert 0.05 < (hidden[0][..., 0] == 0).double().mean() < 0.6
    assert all(bool((table != 0).any(1).all()) for table in model.head.tables)


@pytest.mark.parametrize(("family", "norm"), [("longspan-xl", "post"), ("longspan-xl", "pre"), ("rotary", "pre")])
def test_a_dropped_first_word_does_not_enlarge_gradients(family: str, norm: str) -> None:
    """The first word attends only to itself. If it were all zeros, every norm would multiply its gradient."""
    norms = []
    for rate in (0.0, 0.7):
        torch.manual_seed(0)
        values = {"layers": 14, "width": 64, "norm": norm, "embedding_dropout": rate}
        model = build(family, SMALL | OTHER_PARTS[family] | values).train()
        model.training_loss(text(16), text(16).roll(-1, 1))[0].backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    assert norms[1] < 10 * norms[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_projection_dropout_equals_dropping_rows_of_the_matrix(family: str) -> None:
    """With a batch of one, a locked mask is the same for all positions of segment and memory. A model without these
    rows gives the same hidden states, state and gradients."""
    model, tokens = make(family, projection_dropout=0.4), text(1, 18)
    _, state = make(family).hidden_states(tokens[:, :9])
    other = copy.deepcopy(model)
    seen = [record(layer.attention.projection_dropout) for layer in model.layers]
    hidden, after = model.hidden_states(tokens[:, 9:], state)
    for layer, (keys, values, queries) in zip(other.layers, seen, strict=True):
        attention = layer.attention
        attention.projection_dropout = nn.Identity()
        assert keys[0].shape[1] == 18, "keys of the memory are dropped as well"
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


def test_the_memory_is_used_as_it_was_stored() -> None:
    model, tokens = make(**ALL), text(2, 18)
    hidden, state = model.hidden_states(tokens[:, :9])
    for n, cache in enumerate(state.caches):
        assert torch.equal(cache.hidden, hidden[n]), "the input of the layer, with its dropout"
    seen = [record(layer.attention.key) for layer in model.layers]
    model.hidden_states(tokens[:, 9:], state)
    for cache, ((context, _),) in zip(state.caches, seen, strict=True):
        assert torch.equal(context[:, :9], cache.hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_regularisation_is_off_outside_training(family: str) -> None:
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


def test_input_and_output_dropout_default_to_dropout() -> None:
    losses = []
    for given in ({}, {"input_dropout": 0.3, "output_dropout": 0.3}, {"output_dropout": 0.0}):
        model = make(locked=False, dropout=0.3, **given)
        torch.manual_seed(5)
        losses.append(model.training_loss(text(), text())[0].item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_penalties_equal_their_definition(family: str, documents: bool) -> None:
    model, tokens = make(family, output_dropout=0.5, ar=2.0, tar=0.7), text(2, 6)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[1, 4] = documents
    seen = record(model.output_dropout)
    loss, state = model.training_loss(tokens, tokens.roll(-1, 1), None, 0.0, starts if documents else None)
    ((h, dropped),) = seen
    ar, tar = penalties_by_element(h, dropped, starts)
    plain = model.head.losses(dropped, tokens.roll(-1, 1)).mean()
    assert (loss - plain).item() == pytest.approx(2.0 * ar + 0.7 * tar, abs=1e-9)
    assert state.batch == 2
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"embedding_dropout": 1.0}, r"model\.embedding_dropout=1\.0.*\[0, 1\)"),
        ({"input_dropout": -0.1}, r"model\.input_dropout=-0\.1.*\[0, 1\)"),
        ({"output_dropout": 1.5}, r"model\.output_dropout=1\.5"),
        ({"projection_dropout": 1.0}, r"model\.projection_dropout=1\.0.*\[0, 1\)"),
        ({"ar": -1.0}, r"model\.ar=-1\.0.* 0"),
    ],
)
def test_an_invalid_rate_is_refused_with_the_key_and_its_value(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(**values)
