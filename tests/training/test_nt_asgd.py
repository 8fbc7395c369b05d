"""NT-ASGD, SGD with averaging once validation stops improving, against the paper's algorithm and torch's SGD."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch

from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.average_trigger import AverageTrigger
from longspan.training.recipe import Recipe, TrainingConfig, build_recipe
from tests.training.conftest import content, losses, make_text, train


def recipe(family: str = "awd-lstm", **training: object) -> Recipe:
    """All of AWD-LSTM: five kinds of dropout, two penalties, random segment lengths, NT-ASGD."""
    values = {"steps": 12, "batch": 4, "optimizer": "sgd", "lr": 2.0, "schedule": "constant", "spike": 0.0}
    values |= {"averaging": "asgd", "average_patience": 1, "validate_every": 2, "segment_jitter": 3.0}
    values |= {"segment": 8, "save_every": 1, "keep": 100}
    shape = {"family": family, "layers": 2, "width": 12, "inner": 16}
    return build_recipe({"model": shape, "training": values | training}, "small")


def make_trainer(**training: object) -> Trainer:
    return run.make_trainer(recipe(**training), make_text(150), torch.device("cpu"))[1]


def trigger_index(scores: list[float], patience: int) -> int | None:
    """The score (counted from 1) at which averaging starts."""
    trainer, trigger = make_trainer(), AverageTrigger(patience, 10)
    assert trainer.average is not None
    for k, score in enumerate(scores, start=1):
        trigger.validated(trainer, Validation(10 * k, 1, float(score)))
    return None if trainer.average.start is None else (trainer.average.start + 1) // 10


@pytest.mark.parametrize(
    ("scores", "patience", "start"),
    [
        ([5, 4, 3, 2, 1, 0.5], 2, None),
        # Worse than the last score is not enough: it must be worse than the best of those more than 2 before.
        ([5, 4, 4.5, 3], 2, None),
        ([5, 4, 4.5, 4.6, 4.7], 2, 5),  # 4.7 is compared with min(5, 4), 4.6 only with 5
        ([5, 4, 3, 3.5, 3.9, 3.6], 2, 6),
        ([5, 5.1, 5.2, 5.3], 2, 4),  # it needs 3 earlier scores
        ([5, 5, 5, 5, 5], 2, None),  # equal is not worse
        ([5, 6], 1, None),
        ([5, 6, 7], 1, 3),
        ([3, 4, 4, 4, 4, 4, 4], 5, 7),
        # A score that is not finite is worse than any other.
        ([5, 4, math.nan], 1, 3),
        ([5, 4, -math.inf], 1, 3),
        ([math.nan, 5, 4, 3], 1, None),
        ([-math.inf, 5, 4, 3], 1, None),
        ([math.nan, math.nan, math.nan, 5], 1, None),
    ],
)
def test_the_trigger_on_given_scores(scores: list[float], patience: int, start: int | None) -> None:
    assert trigger_index(scores, patience) == start


def test_it_triggers_once_and_ignores_the_final_validation() -> None:
    trainer, trigger = make_trainer(), AverageTrigger(1, 10)
    assert trainer.average is not None
    for step, score in [(10, 5.0), (20, 6.0), (25, 9.0)]:
        trigger.validated(trainer, Validation(step, 1, score))
    assert trainer.average.start is None
    assert trigger.scores == [5.0, 6.0]
    for step, score in [(30, 7.0), (40, 1.0), (50, 8.0)]:
        trigger.validated(trainer, Validation(step, 1, score))
    assert trainer.average.start == 29


def test_it_equals_torch_sgd_and_then_the_mean_of_its_weights() -> None:
    """Algorithm 1 returns the mean of w_T ... w_k. (torch's ASGD leaves out w_T and the next one.)"""
    trainer, twin = make_trainer(lr=0.3, weight_decay=0.01), make_trainer().model
    model, ours, average = trainer.model, trainer.optimizer, trainer.average
    assert average is not None
    twin.load_state_dict(model.state_dict())
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    # Biases are not decayed.
    by_dims = [{"params": [q for _, q in pairs if q.dim() == n], "weight_decay": d} for n, d in ((2, 0.01), (1, 0.0))]
    theirs = torch.optim.SGD(by_dims, lr=0.3, foreach=False)
    trigger, seen = AverageTrigger(1, 1), []
    for step in range(1, 13):
        for p, q in pairs:
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step(1.0, torch.tensor(0.0))
        theirs.step()
        average.update(step)
        trigger.validated(trainer, Validation(step, 1, 1.0 if step < 5 else 2.0))
        seen.append([q.detach().clone() for _, q in pairs])
        first = 5 if step >= 5 else step  # T = 5: the first score above 1.0
        for n, (mean, (p, q)) in enumerate(zip(average.means.values(), pairs, strict=True)):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(mean, torch.stack([weights[n] for weights in seen[first - 1 :]]).mean(0))
    assert not torch.allclose(next(iter(average.means.values())), pairs[0][0])


class Scripted(Observer):
    """Announces a given score every second step."""

    SCORES = (5.0, 4.0, 4.5, 4.8, 4.9, 4.0)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % 2 == 0:
            trainer.announce(Validation(trainer.step, 1, self.SCORES[trainer.step // 2 - 1]))


# Before, at and after the trigger, in the middle and at the end of a pass. One step is enough for the other families.
@pytest.mark.parametrize(("family", "steps"), [("awd-lstm", (3, 7, 8, 10)), ("lstm", (7,)), ("qrnn", (7,))])
def test_resume_is_exact(family: str, steps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, full = make_text(150), tmp_path / "full"
    started: list[int | None] = []

    class Watch(Observer):
        def after_step(self, trainer: Trainer) -> None:
            assert trainer.average is not None
            started.append(trainer.average.start)

    train(recipe(family), full, text, monkeypatch, Scripted(), AverageTrigger(1, 2), Watch())
    assert started == [None] * 7 + [7] * 5
    expected, curve = content(full / "checkpoint-12"), losses(full)
    for step in steps:
        out = tmp_path / f"from-{step}"
        out.mkdir()
        for part in ("recipe.toml", "metrics.jsonl"):
            shutil.copy(full / part, out / part)
        shutil.copytree(full / f"checkpoint-{step}", out / f"checkpoint-{step}")
        observers = (Scripted(), AverageTrigger(1, 2))
        outcome = train(recipe(family, save_every=1000), out, text, monkeypatch, *observers, resume="auto")
        assert outcome.took_steps == 12 - step
        assert content(out / "checkpoint-12") == expected, f"resumed from step {step}"
        assert losses(out) == curve


def test_what_the_trigger_depends_on_may_not_change_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_text(150)
    train(recipe(steps=2), tmp_path, text, monkeypatch)
    for change in ({"validate_every": 3}, {"validate_tokens": 50}, {"average_patience": 2}):
        with pytest.raises(ConfigError, match=f"{next(iter(change))}="):
            train(recipe(**change), tmp_path, text, monkeypatch, resume="auto")


def test_default_observers_include_the_trigger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = make_text(150)
    monkeypatch.setattr(run, "open_corpus", lambda *_, **__: text)
    observers = run.default_observers(recipe(), tmp_path, text)
    kinds = [type(observer).__name__ for observer in observers]
    assert kinds.index("Validate") < kinds.index("AverageTrigger") < kinds.index("Checkpoints")
    plain = dataclasses.replace(recipe(), training=TrainingConfig(steps=1))
    assert "AverageTrigger" not in [type(o).__name__ for o in run.default_observers(plain, tmp_path, text)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"averaging": "none"}, "average_patience=1.*training.averaging='asgd'"),
        ({"averaging": "ema"}, "average_patience=1.*training.averaging='asgd'"),
        ({"validate_every": 0}, "average_patience=1.*training.validate_every"),
        ({"average_from": 5}, "average_patience=1.*training.average_from=5"),
        ({"average_patience": -1}, "average_patience=-1"),
    ],
)
def test_an_incomplete_trigger_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        recipe(**change)
