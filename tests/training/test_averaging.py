"""Averages against sums worked out step by step."""

import pytest
import torch
from torch import nn

from longspan.training.averaging import Average
from longspan.training.recipe import TrainingConfig


def walk(average: Average, weight: nn.Parameter, steps: int) -> list[torch.Tensor]:
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight))
        average.update(step)
        seen.append(weight.detach().clone())
    return seen


def test_asgd_is_the_plain_mean_from_its_step_on() -> None:
    model = nn.Linear(3, 2, bias=False)
    average = Average(model, TrainingConfig(steps=1, averaging="asgd", average_from=4))
    seen = walk(average, model.weight, 10)
    torch.testing.assert_close(average.means["weight"], torch.stack(seen[4:]).mean(0))


def test_asgd_is_the_weights_before_its_step() -> None:
    model = nn.Linear(3, 2, bias=False)
    average = Average(model, TrainingConfig(steps=1, averaging="asgd", average_from=20))
    walk(average, model.weight, 5)
    torch.testing.assert_close(average.means["weight"], model.weight.detach())


def test_ema_is_the_exponential_mean() -> None:
    model = nn.Linear(3, 2, bias=False)
    average = Average(model, TrainingConfig(steps=1, averaging="ema", average_decay=0.8))
    mean = model.weight.detach().clone()
    for step, weights in enumerate(walk(average, model.weight, 60), start=1):
        decay = min(0.8, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * weights
    torch.testing.assert_close(average.means["weight"], mean)


def test_in_place_comes_and_goes_also_through_an_error() -> None:
    model = nn.Linear(3, 2)
    average = Average(model, TrainingConfig(steps=1, averaging="ema"))
    walk(average, model.weight, 3)
    weights, mean = model.weight.detach().clone(), average.means["weight"].clone()

    def fail() -> None:
        with average.in_place():
            assert torch.equal(model.weight, mean)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(model.weight, weights)
    assert torch.equal(average.means["weight"], mean)
