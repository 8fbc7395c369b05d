"""Reliability: NaN, infinity and spikes never reach the weights, a checkpoint or best/."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longspan.checkpoints.store import newest_good
from longspan.checkpoints.weights import parse_weights
from longspan.training import run
from longspan.training.guard import PATIENCE, SETTLED, Guard
from longspan.training.ledger import NotFiniteError
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.early_stop import EarlyStop
from tests.training.conftest import content, losses, make_recipe, make_text, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))


class Poisoned(nn.Module):
    """An objective whose loss, or only its gradient, is multiplied by a factor at one step."""

    def __init__(self, trainer: Trainer, step: int, factor: float, gradient_only: bool) -> None:
        super().__init__()
        self.inner, self.trainer = trainer.objective, [trainer]
        self.step, self.factor, self.gradient_only = step, factor, gradient_only

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, Any]:
        loss, state = self.inner(*inputs)
        if self.trainer[0].step + 1 == self.step:
            if self.gradient_only:
                loss.register_hook(lambda gradient: gradient * self.factor)
            else:
                loss = loss * self.factor
        return loss, state


class Poison(Observer):
    def __init__(self, step: int, factor: float, gradient_only: bool) -> None:
        self.step, self.factor, self.gradient_only = step, factor, gradient_only
        self.weights: dict[int, list[torch.Tensor]] = {}
        self.trainer: Trainer | None = None

    def begin(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.objective = trainer.fast_objective = Poisoned(trainer, self.step, self.factor, self.gradient_only)
        self.after_step(trainer)

    def after_step(self, trainer: Trainer) -> None:
        self.weights[trainer.step] = [p.detach().clone() for p in trainer.model.parameters()]


STEPS = range(1, 13) if TORTURE else (1, 2, 7)
KINDS = [(math.nan, False), (math.inf, False), (-math.inf, False), (math.nan, True), (math.inf, True)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("factor", "gradient_only"), KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run(
    step: int, factor: float, gradient_only: bool, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, out = make_recipe(training_optimizer=optimizer), make_text(300), tmp_path / "run"
    poison = Poison(step, factor, gradient_only)
    what = "gradient" if gradient_only else "loss"
    with pytest.raises(NotFiniteError, match=rf"{what} of step {step} is not finite.*tokens \d.*check the text of"):
        train(recipe, out, text, monkeypatch, poison)
    assert poison.trainer is not None
    for now, before in zip(poison.trainer.model.parameters(), poison.weights[step - 1], strict=True):
        assert torch.equal(now.detach(), before)
    assert len(losses(out)) == step - 1
    newest = newest_good(out).found
    assert (newest is None) if step == 1 else (newest is not None and newest.path.name == f"checkpoint-{step - 1}")
    if step == 7 and not gradient_only:
        train(recipe, tmp_path / "full_run", text, monkeypatch)
        assert train(recipe, out, text, monkeypatch, resume="auto").finished
        assert content(out / "checkpoint-12") == content(tmp_path / "full_run" / "checkpoint-12")


@pytest.mark.parametrize("step", range(35, 60) if TORTURE else (35, 40))
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_spike_skips_one_update(step: int, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(training_optimizer=optimizer, training_steps=step + 3, training_save_every=1000)
    poison = Poison(step, 1e4, True)
    assert train(recipe, tmp_path / "run", make_text(300), monkeypatch, poison).finished
    for after, before in zip(poison.weights[step], poison.weights[step - 1], strict=True):
        assert torch.equal(after, before)
    assert any(not torch.equal(a, b) for a, b in zip(poison.weights[step + 1], poison.weights[step], strict=True))


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(training_lr=1e38, training_warmup=0, training_spike=0.0, model_dropout=0.0)
    with pytest.raises(NotFiniteError, match=r"the weights after step \d+ are not finite at [^;]+; [^;]+; start in"):
        train(recipe, tmp_path, make_text(300), monkeypatch)
    newest = newest_good(tmp_path, keep=("model.safetensors",)).found
    if newest is not None:
        weights = parse_weights(newest.contents["model.safetensors"], "here")
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_steps_after_a_bad_one_in_the_same_window_do_not_change_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs ahead runs more steps before the host sees the bad one. None may change a weight."""
    _, trainer = run.make_trainer(make_recipe(), make_text(300), torch.device("cpu"))
    trainer.ledger.window = 6
    for _ in range(2):
        trainer.take_step()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.objective = trainer.fast_objective = Poisoned(trainer, 3, math.nan, False)
    for _ in range(3):
        trainer.take_step()
    with pytest.raises(NotFiniteError, match=r"step 3\b"):
        trainer.take_step()
    assert trainer.step == 6
    for now, then in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(now.detach(), then)


def test_many_spikes_in_a_row_become_the_new_level() -> None:
    guard, loss = Guard(10.0, torch.device("cpu")), torch.tensor(1.0)
    for k in range(SETTLED + 8):
        assert guard.check(loss, torch.tensor(1.0 + 0.01 * (k % 3))).item() == 0
    skipped = [guard.check(loss, torch.tensor(50.0)).item() for _ in range(PATIENCE + 4)]
    assert skipped == [1.0] * PATIENCE + [0.0] * 4
    assert guard.check(loss, torch.tensor(55.0)).item() == 0


def test_a_small_rise_is_not_a_spike_and_zero_turns_the_check_off() -> None:
    loss = torch.tensor(1.0)
    steady, off = Guard(10.0, torch.device("cpu")), Guard(0.0, torch.device("cpu"))
    for _ in range(SETTLED):
        steady.check(loss, torch.tensor(1.0))
        off.check(loss, torch.tensor(1.0))
    assert steady.check(loss, torch.tensor(3.9)).item() == 0
    assert off.check(loss, torch.tensor(1e9)).item() == 0
    assert off.check(loss, torch.tensor(math.inf)).item() == 1


class Scripted(Observer):
    """Announces the next of the given scores after every step."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def after_step(self, trainer: Trainer) -> None:
        trainer.announce(Validation(trainer.step, 1, self.scores[trainer.step - 1]))


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ((3.0, math.nan), 1),
        ((3.0, math.inf), 1),
        ((3.0, -math.inf), 1),
        ((math.nan, 3.0), 2),
        ((-math.inf, 3.0), 2),
        ((math.inf, 3.0, math.nan, 2.0, -math.inf, 2.5), 4),
        ((math.nan, math.nan), None),
    ],
)
def test_a_score_that_is_not_finite_is_never_the_best(
    scores: tuple[float, ...], best: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(training_steps=len(scores), training_validate_every=1)
    train(recipe, tmp_path, make_text(300), monkeypatch, Scripted(*scores))
    weights = [tmp_path / name / "model.safetensors" for name in ("best", f"checkpoint-{best}")]
    assert weights[0].exists() == (best is not None)
    if best is not None:
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_scores_that_are_not_finite_count_for_patience_across_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = (math.nan, -math.inf, math.nan, 3.0)
    short, long = (make_recipe(training_steps=k, training_validate_every=1, training_patience=3) for k in (2, 4))
    text, observers = make_text(300), (Scripted(*scores), EarlyStop(3))
    assert not train(short, tmp_path, text, monkeypatch, *observers).stopped_early
    observers = (Scripted(*scores), EarlyStop(3))
    outcome = train(long, tmp_path, text, monkeypatch, *observers, resume="auto")
    assert (outcome.step, outcome.stopped_early) == (3, True)
