"""Dropout masks by a hash: their rate, their independence, and the gradient."""

import pytest
import torch
from torch import nn

from longspan.nn.dropout import HashedDropout, hashed_mask
from longspan.training.dropout import hash_dropout


def draw(rate: float, count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    seeds = (torch.rand(count, 2, generator=generator) * 2**31).to(torch.int32)
    return torch.stack([hashed_mask(pair, torch.Size((64, 128)), rate) for pair in seeds])


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_masks_have_their_rate_and_are_independent(rate: float) -> None:
    """Within five standard deviations: the rate, and correlations of neighbours, rows and seeds."""
    masks = draw(rate)
    signs = (masks.double() - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    assert abs(signs.mean()) * signs.numel() ** 0.5 < 5
    pairs = {
        "units": (signs[..., 1:], signs[..., :-1]),
        "positions": (signs[:, 1:], signs[:, :-1]),
        "seeds": (signs[1:], signs[:-1]),
        "halves": (signs[:, :32], signs[:, 32:]),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) * a.numel() ** 0.5 < 5, name
    # A seed that permuted the positions of another mask would keep the number of kept units.
    assert len({int(mask.sum()) for mask in masks}) > 6


def test_compiled_code_uses_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 50, requires_grad=True)
    model = nn.Sequential(nn.Dropout(0.25))
    hash_dropout(model)
    assert isinstance(model[0], HashedDropout)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(expected, nn.functional.dropout(x, 0.25))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    assert torch.equal(gradient, kept / 0.75)
    assert 0.2 < 1 - kept.double().mean() < 0.3
    assert not torch.equal(y, model(x))
    assert torch.equal(model.eval()(x), x)
