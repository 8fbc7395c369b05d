"""Rounded copies of weights: the numbers of autocast, for weights with no other use than its cast."""

import functools

import pytest
import torch
from torch import nn

from longspan.scoring.dynamic import Dynamics, Learner
from longspan.scoring.rounded import RoundedWeights, only_cast
from tests.scoring.test_dynamic import make_ids, make_model


class Uses(nn.Module):
    """One weight per kind of use."""

    def __init__(self) -> None:
        super().__init__()
        self.cast, self.scaled, self.twice, self.unused = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.table = nn.Embedding(5, 4)

    def forward(self) -> torch.Tensor:
        x = self.cast(self.table(torch.arange(5)))
        x = nn.functional.linear(x, 2 * self.scaled.weight)
        return self.twice(x) + self.twice.weight.sum()


def test_only_weights_with_one_cast_are_chosen() -> None:
    model = Uses()
    weights = list(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        losses = model()
    names = [name for name, _ in model.named_parameters()]
    chosen = only_cast(losses, weights, torch.bfloat16)
    assert [name for name, use in zip(names, chosen, strict=True) if use] == ["cast.weight"]
    assert not any(only_cast(losses, weights, torch.float16))


def test_copies_take_the_place_of_weights_until_they_are_removed() -> None:
    model = Uses()
    model.twice.weight = model.cast.weight  # tied
    weights = list(model.parameters())
    rounded = RoundedWeights(model, weights, [weight is model.cast.weight for weight in weights], torch.bfloat16)
    assert model.cast.weight.dtype == torch.bfloat16
    assert model.cast.weight is model.twice.weight
    assert model.scaled.weight.dtype == torch.float32
    rounded.remove()
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))


def test_losses_and_weights_are_those_of_autocast() -> None:
    """Equal bit for bit, and the model is left as it was."""
    learners = [Learner(make_model("longspan-xl").float(), Dynamics(0.01, 0.1), torch.bfloat16) for _ in range(2)]
    learners[1].rounds = True
    before = list(learners[1].model.named_parameters())
    states = [learner.model.initial_state(1, trainable=True) for learner in learners]
    pieces = torch.from_numpy(make_ids(4 * 9, seed=3)).long().view(4, 1, 9)
    for piece in pieces:
        found = []
        for k, learner in enumerate(learners):
            losses, (states[k],) = learner.step([states[k]], piece[:, :-1], piece[:, 1:], None)
            found.append(losses)
        assert torch.equal(*found)
    assert sum(leaf.dtype == torch.bfloat16 for leaf in learners[1].leaves) >= 2 * 4
    for a, b in zip(learners[0].weights, learners[1].weights, strict=True):
        assert torch.equal(a, b)
    learners[1].restore()
    after = list(learners[1].model.named_parameters())
    assert all(n == m and a is b and a.dtype == torch.float32 for (n, a), (m, b) in zip(before, after, strict=True))


@pytest.mark.torture
def test_compiled_layers_use_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first segment that is not compiled, and with the projection of the memory that a GPU uses."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    learners = [Learner(make_model("longspan-xl").float(), Dynamics(0.01), torch.bfloat16) for _ in range(2)]
    learners[1].rounds = True
    for learner in learners:
        for layer in learner.model.layers:
            layer.detached_memory = True
    states = [learner.model.initial_state(1, trainable=True, filled=True) for learner in learners]
    for n, piece in enumerate(torch.from_numpy(make_ids(3 * 9, seed=3)).long().view(3, 1, 9)):
        found = []
        for k, learner in enumerate(learners):
            step = learner.compiled_step if n else learner.step
            losses, (states[k],) = step([states[k]], piece[:, :-1], piece[:, 1:], None)
            found.append(losses)
        assert torch.equal(*found)
