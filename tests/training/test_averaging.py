"""Averages against sums computed step by step."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from longspan.checkpoints.model_folder import load_model
from longspan.errors import ConfigError
from longspan.scoring.losses import stream_losses
from longspan.training.averaging import Average
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.validation import Validate
from longspan.training.recipe import TrainingConfig, build_recipe
from tests.training.conftest import content, make_recipe, make_text, train


def random_walk(average: Average, weight: nn.Parameter, steps: int, limit: int = 10**6) -> list[torch.Tensor]:
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight))
        average.update(step, step / limit)
        seen.append(weight.detach().clone())
    return seen


def test_asgd_is_the_plain_mean_from_its_start() -> None:
    model = nn.Linear(3, 2, bias=False)
    average = Average(model, TrainingConfig(steps=1, averaging="asgd", average_from=4))
    seen = random_walk(average, model.weight, 10)
    torch.testing.assert_close(average.means["weight"], torch.stack(seen[4:]).mean(0))


@pytest.mark.parametrize("share", [0.0, 0.4, 0.45, 0.7])
def test_a_share_of_the_run_starts_like_its_step(share: float) -> None:
    model = nn.Linear(3, 2, bias=False)
    average = Average(model, TrainingConfig(steps=10, averaging="asgd", average_from=share))
    seen = random_walk(average, model.weight, 10, limit=10)
    start = {0.0: 0, 0.4: 4, 0.45: 5, 0.7: 7}[share]
    assert average.start == start
    torch.testing.assert_close(average.means["weight"], torch.stack(seen[start:]).mean(0))


@pytest.mark.parametrize("value", [-0.5, 1.0, 1.5, 21000.0, float("nan"), float("inf"), "half", True])
def test_a_start_that_is_neither_step_nor_share_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        make_recipe(training_averaging="asgd", training_average_from=value)


def test_in_a_run_limited_by_seconds_a_share_starts_with_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that advances once per reading, half of the run is over long before half of the steps are taken."""
    now = itertools.count()
    monkeypatch.setattr(Trainer, "clock", staticmethod(lambda: float(next(now))))
    limits = {"training_steps": 1000, "training_seconds": 300.0, "training_averaging": "asgd"}
    recipe = make_recipe(**limits, training_average_from=0.5)
    outcome = train(recipe, tmp_path / "whole", make_text(), monkeypatch)
    starts = {
        step: json.loads((tmp_path / "whole" / f"checkpoint-{step}" / "training.json").read_text())
        for step in range(1, outcome.step + 1)
    }
    start = next(step for step, facts in starts.items() if facts["averaging_began"] is not None)
    assert starts[start - 1]["seconds"] < 150 <= starts[start]["seconds"]
    assert start < outcome.step < 100
    assert {facts["averaging_began"] for step, facts in starts.items() if step >= start} == {start}
    # A resume by a clock that has just started keeps the start.
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{start}", resumed / f"checkpoint-{start}")
    shutil.copy(tmp_path / "whole" / "recipe.toml", resumed)
    longer = make_recipe(**limits | {"training_seconds": 500.0}, training_average_from=0.5)
    train(longer, resumed, make_text(), monkeypatch, resume="auto")
    facts = json.loads((resumed / f"checkpoint-{start + 1}" / "training.json").read_text())
    assert facts["averaging_began"] == start


def test_asgd_equals_the_weights_before_its_start() -> None:
    model = nn.Linear(3, 2, bias=False)
    average = Average(model, TrainingConfig(steps=1, averaging="asgd", average_from=20))
    random_walk(average, model.weight, 5)
    torch.testing.assert_close(average.means["weight"], model.weight.detach())


def test_ema_is_the_exponential_mean() -> None:
    model = nn.Linear(3, 2, bias=False)
    average = Average(model, TrainingConfig(steps=1, averaging="ema", average_decay=0.8))
    mean = model.weight.detach().clone()
    for step, weights in enumerate(random_walk(average, model.weight, 60), start=1):
        decay = min(0.8, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * weights
    torch.testing.assert_close(average.means["weight"], mean)


def test_in_place_restores_the_weights_after_an_error() -> None:
    model = nn.Linear(3, 2)
    average = Average(model, TrainingConfig(steps=1, averaging="ema"))
    random_walk(average, model.weight, 3)
    weights, mean = model.weight.detach().clone(), average.means["weight"].clone()

    def fail() -> None:
        with average.in_place():
            assert torch.equal(model.weight, mean)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(model.weight, weights)
    assert torch.equal(average.means["weight"], mean)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("averaging", ["asgd", "ema"])
def test_validation_and_the_saved_model_use_the_mean(
    optimizer: str, averaging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"training_average_from": 3} if averaging == "asgd" else {"training_average_decay": 0.7}
    recipe = make_recipe(
        training_steps=6, training_optimizer=optimizer, training_averaging=averaging, training_save_every=6, **more
    )
    seen: list[dict[str, torch.Tensor]] = []
    scores: list[float] = []

    class Watch(Observer):
        def begin(self, trainer: Trainer) -> None:
            self.after_step(trainer)

        def after_step(self, trainer: Trainer) -> None:
            seen.append({name: p.detach().double() for name, p in trainer.model.named_parameters()})

        def validated(self, trainer: Trainer, validation: Validation) -> None:
            scores.append(validation.nats)

    train(recipe, tmp_path, make_text(), monkeypatch, Watch(), Validate(make_text(300), 6))
    means = {name: torch.stack([weights[name] for weights in seen[4:]]).mean(0) for name in seen[0]}
    if averaging == "ema":
        means = seen[0]
        for step, weights in enumerate(seen[1:], start=1):
            decay = min(0.7, (1 + step) / (10 + step))
            means = {name: decay * mean + (1 - decay) * weights[name] for name, mean in means.items()}
    assert any((means[name] - seen[-1][name]).abs().max() > 1e-4 for name in means)
    model = load_model(tmp_path / "checkpoint-6").model.eval()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), means[name], rtol=0, atol=1e-6)
    text = make_text(300)
    streams = stream_losses(model, text.ids, recipe.evaluation_reading(), streams=4, starts=text.starts)
    assert scores == [pytest.approx(float(np.concatenate([s.losses for s in streams]).mean()), rel=1e-5)]


def test_a_model_with_buffers_is_resumed_from_its_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model file has the mean of the parameters and, for a Reformer, buffers, which have no mean."""
    shape = {"family": "reformer", "layers": 1, "width": 8, "heads": 2, "inner": 8, "chunk": 4}
    training = {"steps": 3, "batch": 2, "segment": 8, "lr": 0.01, "save_every": 2, "averaging": "ema"}
    recipe, text = build_recipe({"model": shape, "training": training}, "small"), make_text(300)
    train(recipe, tmp_path, text, monkeypatch)
    assert "rotations" in dict(load_model(tmp_path / "checkpoint-2").model.named_buffers())
    expected = content(tmp_path / "checkpoint-3")
    shutil.rmtree(tmp_path / "checkpoint-3")
    assert train(recipe, tmp_path, text, monkeypatch, resume="auto").took_steps == 1
    assert content(tmp_path / "checkpoint-3") == expected
