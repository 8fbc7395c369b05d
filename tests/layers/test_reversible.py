"""Layers computed again give what layers kept would give, whatever was drawn on the way."""

import pytest
import torch
from torch import nn

from longspan.layers.reversible import ReversibleLayer, read_reversibly


class Scaled(nn.Module):
    """drop(tanh(W x)) * context, and a sign it decides once: a plan."""

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


def gradients(layers, kept: bool):
    """Output, gradients of the input and every weight, and the state of the random numbers behind it all."""
    weights = [p for layer in layers for p in layer.parameters()]
    x = torch.linspace(-2, 2, 2 * 7 * 6, dtype=weights[0].dtype).view(2, 7, 6).requires_grad_()
    contexts = [torch.tensor(1.0 + 0.1 * n, dtype=x.dtype) for n in range(len(layers))]
    torch.manual_seed(5)
    if kept:
        y1 = y2 = x
        for layer, context in zip(layers, contexts, strict=True):
            y1, y2 = layer(y1, y2, context)
    else:
        y1, y2 = read_reversibly(layers, x, x, contexts)
    found = torch.autograd.grad((y1.sin() + y2.square()).sum(), [x, *weights])
    return (y1 + 2 * y2).detach(), found, torch.get_rng_state()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("rate", "pieces"), [(0.0, 1), (0.3, 1), (0.3, 3)])
def test_gradients_are_those_of_kept_activations(
    rate: float, pieces: int, dtype: torch.dtype, tolerance: float
) -> None:
    layers = make(8, rate, pieces, dtype)
    kept, expected, random = gradients(layers, kept=True)
    output, found, random_again = gradients(layers, kept=False)
    assert torch.equal(output, kept)
    assert torch.equal(random, random_again), "computing again must not use up random numbers"
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < tolerance


def test_pieces_are_the_whole() -> None:
    whole, cut = (gradients(make(3, 0.0, pieces, torch.float64), kept=False) for pieces in (1, 4))
    for a, b in zip((whole[0], *whole[1]), (cut[0], *cut[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_weights_put_in_the_module_s_place_get_the_gradients() -> None:
    """Weight dropout swaps weights for the forward pass alone; the backward pass comes when they are gone."""
    layers = nn.ModuleList(make(2, 0.0, 1, torch.float64))

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x, kept):
            if not kept:
                return sum(read_reversibly(list(self.layers), x, x, [1.0, 1.0]))
            y1 = y2 = x
            for layer in self.layers:
                y1, y2 = layer(y1, y2, 1.0)
            return y1 + y2

    read, x = Read(), torch.randn(1, 5, 6, dtype=torch.float64)
    frozen = "layers.0.g.1.weight"
    dict(read.named_parameters())[frozen].requires_grad_(False)
    trained = {name: p for name, p in read.named_parameters() if name != frozen}
    found = {}
    for kept in (True, False):
        halved = {name: 0.5 * p for name, p in trained.items()}
        y = torch.func.functional_call(read, halved, (x, kept))
        found[kept] = torch.autograd.grad(y.square().sum(), list(trained.values()))
    for a, b in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
