"""Training without the gradient of the memory: the same losses and gradients of all weights, in float64."""

from typing import Any

import pytest
import torch

from longspan.nn.transformer import TransformerLayer
from tests.support import build

SHAPE = {"vocabulary": 11, "layers": 2, "width": 12, "heads": 2, "inner": 20, "segment": 5, "dropout": 0.0}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("longspan-xl", {"memory": 7}),
        ("longspan-xl", {"memory": 3, "norm_type": "layer"}),
        ("rotary", {"memory": 5, "norm": "post"}),
    ],
)
def test_gradients_equal_those_of_autograd(family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build(family, {**SHAPE, **more}).double().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.5)  # gains too
    tokens = torch.randint(11, (2, 16))
    found = []
    for detached in (False, True):
        monkeypatch.setattr(TransformerLayer, "detached_memory", detached)
        model.zero_grad()
        state, losses = None, []
        for begin in (0, 5, 10):  # the memory is empty, partly filled and full
            state = None if state is None else state.detach()
            loss, state = model.training_loss(tokens[:, begin : begin + 5], tokens[:, begin + 1 : begin + 6], state)
            losses.append(loss)
        sum(losses).backward()
        found.append([*losses, *(p.grad for p in model.parameters())])
    assert all(value is not None for value in found[0])
    for got, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
