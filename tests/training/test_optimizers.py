"""AdamW, Muon and SGD: their parameters, their updates, and no update when it is blocked."""

import pytest
import torch
from torch import nn

from longspan.errors import CheckpointError
from longspan.models.families import family
from longspan.training.optimizers import NEWTON_SCHULZ, Muon, Optimizer, hidden_matrices, orthogonalise
from longspan.training.recipe import TrainingConfig
from tests.training.conftest import make_recipe

ALLOW, BLOCK = torch.tensor(0.0), torch.tensor(1.0)


def orthogonalise_one(matrix: torch.Tensor) -> torch.Tensor:
    """The definition for one matrix, in float64."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(5, 16, 16), (3, 7, 33), (4, 40, 9), (1, 1, 5)])
def test_batched_newton_schulz_equals_the_definition(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape)
    for made, matrix in zip(orthogonalise(matrices), matrices, strict=True):
        torch.testing.assert_close(made.double(), orthogonalise_one(matrix), atol=2e-5, rtol=2e-4)


def test_singular_values_become_nearly_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 24, 40)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_against_a_loop_in_float64() -> None:
    shapes = [(6, 6), (6, 12), (12, 6), (6, 12), (6, 6)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = Muon(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
    weights = [p.detach().double().clone() for p in parameters]
    momenta = [torch.zeros_like(w) for w in weights]
    for _ in range(4):
        for k, p in enumerate(parameters):
            p.grad = torch.randn_like(p)
            gradient = p.grad.double()
            momenta[k] = 0.9 * momenta[k] + 0.1 * gradient
            change = orthogonalise_one(0.9 * momenta[k] + 0.1 * gradient)
            scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            weights[k] = weights[k] * (1 - 0.05 * 0.1) - 0.05 * scale * change
        optimizer.step()
    for p, expected in zip(parameters, weights, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, atol=1e-4, rtol=1e-3)


def small_model() -> nn.Module:
    recipe = make_recipe()
    return family(recipe.family)(recipe.model)


def give_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def test_muon_updates_only_hidden_matrices() -> None:
    model = small_model()
    optimizer = Optimizer(model, TrainingConfig(steps=1, optimizer="muon", weight_decay=0.1))
    muon, adamw = optimizer.parts
    names = {optimizer.names[p] for p in muon.param_groups[0]["params"]}
    assert names == hidden_matrices(model)
    assert {n.split(".")[-2] for n in names} == {"query", "key", "value", "output", "position", "up", "down"}
    decayed, plain = adamw.param_groups
    assert {optimizer.names[p] for p in decayed["params"]} == {"embedding.tables.0"}
    assert {"u", "w", "layers.0.attention_norm.weight"} <= {optimizer.names[p] for p in plain["params"]}
    every = [p for part in optimizer.parts for group in part.param_groups for p in group["params"]]
    assert len({id(p) for p in every}) == len(every) == len(list(model.parameters()))


def test_adamw_equals_that_of_torch() -> None:
    model, twin = small_model(), small_model()
    twin.load_state_dict(model.state_dict())
    config = TrainingConfig(steps=1, lr=0.01, betas=(0.8, 0.9))
    ours = Optimizer(model, config)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.005, betas=(0.8, 0.9), weight_decay=0.0, foreach=False)
    for _ in range(3):
        give_gradients(model)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        ours.step(0.5, ALLOW)
        theirs.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
def test_a_blocked_step_changes_nothing(kind: str, poison: float) -> None:
    model = small_model()
    optimizer = Optimizer(model, TrainingConfig(steps=1, optimizer=kind, weight_decay=0.1))
    give_gradients(model)
    optimizer.step(1.0, ALLOW)
    weights = [p.detach().clone() for p in model.parameters()]
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    for p in model.parameters():
        p.grad = p.grad * poison
    optimizer.step(1.0, BLOCK)
    assert all(torch.equal(p.detach(), w) for p, w in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.tensors().items())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_state_can_be_saved_and_loaded(kind: str) -> None:
    model = small_model()
    config = TrainingConfig(steps=1, optimizer=kind)
    first, second = Optimizer(model, config), Optimizer(model, config)
    give_gradients(model)
    first.step(1.0, ALLOW)
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()}, "here")
    assert all(torch.equal(t, first.tensors()[name]) for name, t in second.tensors().items())
    with pytest.raises(CheckpointError, match="here "):
        second.load({}, "here")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_embedding_has_its_own_rate(optimizer: str) -> None:
    """With gradients of one, the first update of both optimizers is the learning rate."""
    recipe = make_recipe(training_optimizer=optimizer, training_lr=0.01, training_embedding_rate=3.0)
    model = family(recipe.family)(recipe.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = Optimizer(model, recipe.training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step(1.0, ALLOW)
    for name, parameter in model.named_parameters():
        rate = 0.03 if name.startswith("embedding.") else 0.01
        torch.testing.assert_close(before[name] - parameter.detach(), torch.full_like(parameter, rate))
