"""Recomputed layers give the same outputs and gradients as stored activations, with the same random numbers."""

import pytest
import torch
from torch import nn

from longspan.nn.reversible import ReversibleLayer, run_reversible


class Scaled(nn.Module):
    """drop(tanh(W x)) * context * plan, where the plan is a sign that is computed once."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.map, self.dropout = nn.Linear(width, width), nn.Dropout(rate)

    def forward(self, x, context, plan):
        inside = self.map(x)
        plan = (inside.detach() > 0).to(torch.int8) if plan is None else plan
        return self.dropout(inside.tanh()) * context * plan, plan


def make(layers: int, rate: float, pieces: int, dtype: torch.dtype) -> list[ReversibleLayer]:
    torch.manual_seed(3)
    return [
        ReversibleLayer(
            Scaled(6, rate), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Dropout(rate)), pieces
        ).to(dtype)
        for _ in range(layers)
    ]


def gradients(layers, stored: bool):
    """Output, gradients of the input and every weight, and the state of the random generator afterwards."""
    weights = [p for layer in layers for p in layer.parameters()]
    x = torch.linspace(-2, 2, 2 * 7 * 6, dtype=weights[0].dtype).view(2, 7, 6).requires_grad_()
    contexts = [torch.tensor(1.0 + 0.1 * n, dtype=x.dtype) for n in range(len(layers))]
    torch.manual_seed(5)
    if stored:
        y1 = y2 = x
        for layer, context in zip(layers, contexts, strict=True):
            y1, y2 = layer(y1, y2, context)
    else:
        y1, y2 = run_reversible(layers, x, x, contexts)
    found = torch.autograd.grad((y1.sin() + y2.square()).sum(), [x, *weights])
    return (y1 + 2 * y2).detach(), found, torch.get_rng_state()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("rate", "pieces"), [(0.0, 1), (0.3, 1), (0.3, 3)])
def test_gradients_equal_those_of_stored_activations(
    rate: float, pieces: int, dtype: torch.dtype, tolerance: float
) -> None:
    layers = make(8, rate, pieces, dtype)
    wanted, expected, random = gradients(layers, stored=True)
    output, found, random_again = gradients(layers, stored=False)
    assert torch.equal(output, wanted)
    assert torch.equal(random, random_again), "recomputation must not consume random numbers"
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < tolerance


def test_pieces_do_not_change_the_result() -> None:
    complete, cut = (gradients(make(3, 0.0, pieces, torch.float64), stored=False) for pieces in (1, 4))
    for a, b in zip((complete[0], *complete[1]), (cut[0], *cut[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_replaced_weights_get_the_gradients() -> None:
    """Weight dropout replaces weights during the forward pass only; the backward pass must still use them."""
    layers = nn.ModuleList(make(2, 0.0, 1, torch.float64))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x, stored):
            if not stored:
                return sum(run_reversible(list(self.layers), x, x, [1.0, 1.0]))
            y1 = y2 = x
            for layer in self.layers:
                y1, y2 = layer(y1, y2, 1.0)
            return y1 + y2

    stack, x = Stack(), torch.randn(1, 5, 6, dtype=torch.float64)
    frozen = "layers.0.g.1.weight"
    dict(stack.named_parameters())[frozen].requires_grad_(False)
    trained = {name: p for name, p in stack.named_parameters() if name != frozen}
    found = {}
    for stored in (True, False):
        halved = {name: 0.5 * p for name, p in trained.items()}
        y = torch.func.functional_call(stack, halved, (x, stored))
        found[stored] = torch.autograd.grad(y.square().sum(), list(trained.values()))
    for a, b in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
