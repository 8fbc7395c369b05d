"""The auxiliary losses of Al-Rfou et al. 2018, computed step by step from hidden states."""

import pytest
import torch

from longspan.errors import ConfigError
from longspan.models.vanilla import Vanilla
from longspan.training.recipe import load_recipe
from tests.support import build

LAYERS = 4
SMALL = {
    "vocabulary": 11,
    "layers": LAYERS,
    "width": 8,
    "heads": 2,
    "segment": 12,
    "max_distance": 11,
    "dropout": 0.0,
    "position": "learned",
}
BOTH = {"layer_losses": True, "targets": 2}


def make(**changes) -> Vanilla:
    torch.manual_seed(1)
    model = build("vanilla", SMALL | changes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def text() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (3, 13), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


def classifier(model: Vanilla, layer: int, ahead: int):
    """Weight and bias of the classifier of a layer for the token `ahead` positions later; both are counted from 1."""
    head = (
        model.head
        if (layer, ahead) == (LAYERS, 1)
        else model.auxiliary.heads[model.auxiliary.scored.index((layer, ahead))]
    )
    return head.tables[0], head.biases[0]


def expected_loss(model: Vanilla, layer: int, ahead: int) -> torch.Tensor:
    """The mean loss of that layer when position t predicts token t + ahead."""
    tokens, targets = text()
    hidden, _ = model.hidden_states(tokens)
    weight, bias = classifier(model, layer, ahead)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(3):
        for t in range(12):
            if t + ahead <= 12:
                scores = weight @ hidden[layer][row, t] + bias
                total = total - scores.log_softmax(0)[targets[row, t + ahead - 1]]
                count += 1
    return total / count


@pytest.mark.parametrize(
    ("progress", "shares"),
    [
        (0.0, {1: 1, 2: 1, 3: 1, 4: 1}),
        (0.12, {1: 0.04, 2: 0.52, 3: 0.68, 4: 1}),
        (0.125, {2: 0.5, 3: 2 / 3, 4: 1}),
        (0.3, {3: 0.2, 4: 1}),
        (0.375, {4: 1}),
        (0.6, {4: 1}),
        (1.0, {4: 1}),
    ],
)
def test_the_loss_of_layer_l_of_n_falls_to_zero_at_progress_l_over_2n(
    progress: float, shares: dict[int, float]
) -> None:
    model, (tokens, targets) = make(**BOTH), text()
    found, _ = model.training_loss(tokens, targets, progress=progress)
    expected = sum(
        c * (expected_loss(model, layer, 1) + 0.5 * expected_loss(model, layer, 2)) for layer, c in shares.items()
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    compiled, _ = model.training_loss(tokens, targets, progress=torch.tensor(progress, dtype=torch.float64))
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(found, [classifier(model, n, 1)[0] for n in range(1, LAYERS)], allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [layer in shares for layer in range(1, LAYERS)]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"targets": 3}, [(4, 1, 1.0), (4, 2, 0.5), (4, 3, 0.5)]),
        ({"layer_losses": True}, [(n, 1, 1.0) for n in (1, 2, 3, 4)]),
    ],
)
def test_each_kind_of_auxiliary_loss_alone(changes: dict, parts: list[tuple[int, int, float]]) -> None:
    model = make(**changes)
    found, _ = model.training_loss(*text())
    expected = sum(weight * expected_loss(model, layer, ahead) for layer, ahead, weight in parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_classifier_of_the_second_target_gets_gradients_from_second_targets_only() -> None:
    model, (tokens, targets) = make(**BOTH), text()
    loss, _ = model.training_loss(tokens, targets)
    for layer in range(1, LAYERS + 1):
        second = classifier(model, layer, 2)
        found = torch.autograd.grad(loss, second, retain_graph=True)
        expected = torch.autograd.grad(0.5 * expected_loss(model, layer, 2), second)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    changed = targets.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 11  # the second target of no position
    other, _ = model.training_loss(tokens, changed)
    pairs = [(classifier(model, layer, ahead)[0], ahead) for layer in range(1, LAYERS + 1) for ahead in (1, 2)]
    for weight, ahead in pairs:
        a, b = (torch.autograd.grad(value, weight, retain_graph=True)[0] for value in (loss, other))
        assert torch.equal(a, b) == (ahead == 2)


def test_scoring_does_not_use_auxiliary_losses() -> None:
    model, plain, (tokens, targets) = make(**BOTH), make(), text()
    result = plain.load_state_dict(model.state_dict(), strict=False)
    assert not result.missing_keys
    assert all(name.startswith("auxiliary.") for name in result.unexpected_keys)
    assert torch.equal(model.losses(tokens, targets)[0], plain.losses(tokens, targets)[0])
    assert torch.equal(model(tokens)[0], plain(tokens)[0])
    assert torch.equal(plain.training_loss(tokens, targets)[0], plain.losses(tokens, targets)[0].mean())


def test_a_segment_of_one_token_has_no_second_target() -> None:
    model, (tokens, targets) = make(targets=2), text()
    found, _ = model.training_loss(tokens[:, :1], targets[:, :1])
    torch.testing.assert_close(found, model.losses(tokens[:, :1], targets[:, :1])[0].mean())


def test_auxiliary_classifiers_use_the_adaptive_softmax() -> None:
    model, (tokens, targets) = make(cutoffs=[3, 7], div_val=2, tie_projections=True, **BOTH), text()
    hidden, _ = model.hidden_states(tokens)
    found, _ = model.training_loss(tokens, targets, progress=0.4)
    second = model.auxiliary.heads[-1].logits(hidden[-1][:, :-1])  # clusters: logits are log-probabilities
    expected = -second.gather(-1, targets[:, 1:, None]).mean()
    torch.testing.assert_close(found, model.losses(tokens, targets)[0].mean() + 0.5 * expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("inner", "count"), [(1792, 41_083_904), (2048, 44_232_704)])
def test_the_parameter_count_of_the_recipe_includes_the_classifiers(inner: int, count: int) -> None:
    """As many as the other recipes, and 44M as in the paper with another `inner`; counted from the shapes."""
    recipe = load_recipe("enwik8-al-rfou", [] if inner == 1792 else [f"model.inner={inner}"])
    with torch.device("meta"):
        model = Vanilla(recipe.model)
        demo = Vanilla(load_recipe("demo-al-rfou").model)
    classifiers = 23 * (256 * 512 + 256)
    assert sum(p.numel() for p in model.auxiliary.parameters()) == classifiers
    layer = 4 * 512**2 + 2 * 512 * inner + inner + 512 + 4 * 512
    assert model.parameter_count - classifiers == 12 * (layer + 512 * 512) + 2 * 256 * 512 + 256
    assert model.parameter_count == count
    assert abs(demo.parameter_count / 890_112 - 1) < 0.02


@pytest.mark.parametrize("targets", [0, 13])
def test_targets_beyond_the_segment_are_refused(targets: int) -> None:
    limit = " 1" if targets < 1 else "segment.* 12"
    with pytest.raises(ConfigError, match=rf"model\.targets={targets}.*{limit}"):
        build("vanilla", SMALL | {"targets": targets})
