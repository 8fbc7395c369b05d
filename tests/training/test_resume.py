"""Reliability: a run resumed from any of its steps ends bit-equal."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from longspan.checkpoints.store import CheckpointWarning
from longspan.errors import CheckpointError, ConfigError, DataError
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from tests.training.conftest import content, losses, make_recipe, make_text, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
# With 4 rows of 8 tokens, a text of 120 tokens ends a pass every fourth step, with a shorter segment.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dropout and carried memory": {},
    "ends of passes": {"tokens": 120},
    "accumulation": {"training_accumulate": 2, "tokens": 120},
    "schedules": {
        "training_batch": [[0, 2], [2, 4], [4, 3]],
        "training_segment": [[0, 4], [2, 8]],
        "training_memory": [[0, 4], [5, 12]],
        "tokens": 300,
    },
    "muon and ema": {"training_optimizer": "muon", "training_averaging": "ema", "training_weight_decay": 0.01},
    "asgd, locked and weight dropout": {
        "training_averaging": "asgd",
        "training_average_from": 3,
        "training_locked_dropout": True,
        "training_weight_dropout": 0.2,
    },
    "asgd from a share of the run": {"training_averaging": "asgd", "training_average_from": 0.5},
    "checkpointed activations": {"training_checkpoint_activations": True, "model_attention_dropout": 0.1},
    "segments of random length": {"training_segment_jitter": 3.0, "training_accumulate": 2, "tokens": 120},
    "no memory": {"training_memory": 0, "tokens": 120},
    "overlap": {"training_memory": 0, "training_overlap": 5, "tokens": 120},
    "CUDA graph": {"training_cuda_graph": True, "tokens": 120},
    "a convolution, at first without memory": {
        "model_family": "longspan-xl",
        "model_convolution": 3,
        "training_memory": [[0, 0], [2, 4], [5, 12]],
        "tokens": 120,
    },
    "pointer": {"model_family": "longspan-xl", "model_pointer_width": 4, "training_pointer": 20, "tokens": 120},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resume_from_every_step_is_exact(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The long form has 60 steps with dropout, accumulation, carried memory and ends of passes.
    steps = 61 if TORTURE and name == "accumulation" else 8 if TORTURE else 6
    changes = dict(CONFIGURATIONS[name])
    text = make_text(changes.pop("tokens", 700))
    recipe = make_recipe(training_steps=steps, **changes)
    save_rarely = make_recipe(training_steps=steps, training_save_every=1000, **changes)
    full = tmp_path / "full"
    assert train(recipe, full, text, monkeypatch).finished
    expected, curve = content(full / f"checkpoint-{steps}"), losses(full)
    assert len(curve) == steps
    for step in range(1, steps):
        out = tmp_path / f"from-{step}"
        out.mkdir()
        for part in ("recipe.toml", "metrics.jsonl"):
            shutil.copy(full / part, out / part)
        shutil.copytree(full / f"checkpoint-{step}", out / f"checkpoint-{step}")
        outcome = train(save_rarely, out, text, monkeypatch, resume="auto")
        assert outcome.took_steps == steps - step
        assert content(out / f"checkpoint-{steps}") == expected, f"resumed from step {step}"
        assert losses(out) == curve
        shutil.rmtree(out)


class Send(Observer):
    """Sends this process a signal after a given step, and again after each of the given delays."""

    def __init__(self, step: int, number: signal.Signals, *later: float) -> None:
        self.step, self.number, self.later = step, number, later

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), self.number)
            for wait in self.later:
                time.sleep(wait)
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_prints_how_to_continue(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text = make_recipe(training_save_every=100), make_text()
    train(recipe, tmp_path / "full", text, monkeypatch)
    out = tmp_path / "run"
    outcome = train(recipe, out, text, monkeypatch, Send(5, number))
    assert outcome.interrupted is number
    assert not outcome.finished
    command = f"longspan train --out {out} --resume auto"
    assert outcome.sentence.endswith(f": {command}")
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "one")
        patch.setenv("RANK", "0")
        assert outcome.sentence.endswith(f": torchrun ... -m {command}")
    assert (out / f"checkpoint-{outcome.step}").is_dir()
    assert train(recipe, out, text, monkeypatch, resume="auto").finished
    assert content(out / "checkpoint-12") == content(tmp_path / "full" / "checkpoint-12")
    assert losses(out) == losses(tmp_path / "full")


def test_two_signals_at_once_count_as_one_and_a_later_one_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout -s INT` sends one to the process and one to its group."""
    recipe, text, out = make_recipe(training_save_every=100), make_text(), tmp_path / "run"
    outcome = train(recipe, out, text, monkeypatch, Send(5, signal.SIGINT, 0.01))
    assert (outcome.interrupted, outcome.step) == (signal.SIGINT, 6)
    assert (out / "checkpoint-6").is_dir()
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "other", text, monkeypatch, Send(5, signal.SIGINT, 1.1))
    assert not list((tmp_path / "other").glob("checkpoint-*"))


def test_a_signal_in_the_last_step_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Observer):
        def row(self, trainer: Trainer, row: object) -> None:
            if trainer.step == 12:
                os.kill(os.getpid(), signal.SIGTERM)

    outcome = train(make_recipe(), tmp_path / "run", make_text(), monkeypatch, Late())
    assert (outcome.finished, outcome.interrupted) == (True, None)


def test_resume_auto_starts_a_new_run_and_does_not_touch_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, out = make_recipe(), make_text(), tmp_path / "run"
    assert train(recipe, out, text, monkeypatch, resume="auto").took_steps == 12
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    outcome = train(recipe, out, text, monkeypatch, resume="auto")
    assert (outcome.finished, outcome.took_steps) == (True, 0)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_broken_newest_checkpoints_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text, out = make_recipe(), make_text(), tmp_path / "run"
    train(recipe, out, text, monkeypatch)
    expected, curve = content(out / "checkpoint-12"), losses(out)
    (out / "checkpoint-12" / "manifest.json").unlink()
    weights = out / "checkpoint-11" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.warns(CheckpointWarning):
        assert train(recipe, out, text, monkeypatch, resume="auto").took_steps == 2
    assert content(out / "checkpoint-12") == expected
    assert losses(out) == curve
    assert (out / "broken-checkpoint-12").is_dir()


def test_a_finished_run_can_be_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = make_text(), tmp_path / "run"
    train(make_recipe(training_schedule="constant"), out, text, monkeypatch)
    longer = make_recipe(training_schedule="constant", training_steps=20)
    assert train(longer, out, text, monkeypatch, resume="auto").took_steps == 8
    train(longer, tmp_path / "full", text, monkeypatch)
    assert content(out / "checkpoint-20") == content(tmp_path / "full" / "checkpoint-20")


def test_a_branch_starts_from_another_runs_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text = make_recipe(), make_text()
    train(recipe, tmp_path / "run", text, monkeypatch)
    start = str(tmp_path / "run" / "checkpoint-5")
    assert train(recipe, tmp_path / "branch", text, monkeypatch, resume=start).took_steps == 7
    assert content(tmp_path / "branch" / "checkpoint-12") == content(tmp_path / "run" / "checkpoint-12")
    with pytest.raises(ConfigError, match=r"checkpoint-12.*checkpoint-5.*folder"):
        train(recipe, tmp_path / "run", text, monkeypatch, resume=start)


class Stops(Observer):
    """Stops a run after a given step without a checkpoint, as a kill would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            raise KeyboardInterrupt


def test_a_branch_without_a_checkpoint_restarts_from_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, start = make_text(300), str(tmp_path / "run" / "checkpoint-3")
    train(make_recipe(training_steps=4), tmp_path / "run", text, monkeypatch, Scripted())
    lower = make_recipe(training_lr=0.001, training_steps=6, training_save_every=100)
    branch, full = tmp_path / "branch", tmp_path / "full"
    train(lower, full, text, monkeypatch, Scripted(), resume=start)
    for resume in (start, "auto", "auto"):
        with pytest.raises(KeyboardInterrupt):
            train(lower, branch, text, monkeypatch, Scripted(), Stops(5), resume=resume)
    early = tmp_path / "early"  # killed between writing run.json and recipe.toml
    early.mkdir()
    shutil.copy(branch / "run.json", early)
    for out in (branch, early):
        assert train(lower, out, text, monkeypatch, Scripted(), resume="auto").took_steps == 3
        assert content(out / "checkpoint-6") == content(full / "checkpoint-6")
        assert (out / "metrics.jsonl").read_text().count("\n") == 3
        weights = [folder / "best" / "model.safetensors" for folder in (out, full)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    longer = make_recipe(training_lr=0.001, training_steps=7)
    shutil.rmtree(tmp_path / "run")
    assert train(longer, branch, text, monkeypatch, Scripted(), resume="auto").took_steps == 1


class Scripted(Observer):
    """Announces a worse score after every step."""

    def after_step(self, trainer: Trainer) -> None:
        trainer.announce(Validation(trainer.step, 1, float(trainer.step)))


@pytest.mark.parametrize("missing", [True, False])
def test_a_branch_is_refused_if_its_origin_is_missing_or_changed(
    missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, start = make_recipe(training_save_every=3), make_text(300), tmp_path / "run" / "checkpoint-3"
    train(make_recipe(training_steps=3), tmp_path / "run", text, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "branch", text, monkeypatch, Stops(4), resume=str(start))
    shutil.rmtree(start)
    if not missing:
        train(make_recipe(training_steps=3, training_seed=5), tmp_path / "other", text, monkeypatch)
        shutil.copytree(tmp_path / "other" / "checkpoint-3", start)
    with pytest.raises(CheckpointError, match=str(start)):
        train(recipe, tmp_path / "branch", text, monkeypatch, resume="auto")
    assert not list((tmp_path / "branch").glob("checkpoint-*"))


def test_errors_of_a_resume_name_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text, out = make_recipe(), make_text(), tmp_path / "run"
    train(recipe, out, text, monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    longer = make_recipe(training_steps=20)
    with pytest.raises(ConfigError, match=rf"{out} .*resume='auto'"):
        train(recipe, out, text, monkeypatch)
    with pytest.raises(DataError, match=r"a small text.*b{12}.*a{12}"):
        train(longer, out, make_text(fingerprint="b" * 64), monkeypatch, resume="auto")
    with pytest.raises(ConfigError, match=r"model.width=16.* 32;"):
        train(make_recipe(model_width=32), out, text, monkeypatch, resume="auto")
    with pytest.raises(ConfigError, match=r"training.lr=0.01.* 0.02;"):
        train(make_recipe(training_lr=0.02), out, text, monkeypatch, resume="auto")
    with pytest.raises(CheckpointError, match="nowhere"):
        train(recipe, out, text, monkeypatch, resume=str(tmp_path / "nowhere"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'other'} "):
        train(recipe, tmp_path / "other", text, monkeypatch, resume="auto")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_checkpoint_keeps_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed recipe is refused even if the checkpoint was moved or the run's recipe.toml was edited."""
    recipe, text, out = make_recipe(), make_text(), tmp_path / "run"
    train(recipe, out, text, monkeypatch)
    shutil.copytree(out / "checkpoint-5", tmp_path / "mine")
    moved = str(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"mine .*training.clamp=.* 5;"):
        train(make_recipe(training_clamp=5), tmp_path / "branch", text, monkeypatch, resume=moved)
    with pytest.raises(ConfigError, match=r"training.batch=4"):
        train(make_recipe(training_batch=2), tmp_path / "branch", text, monkeypatch, resume=moved)
    assert not (tmp_path / "branch").exists()
    assert train(recipe, tmp_path / "branch", text, monkeypatch, resume=moved).took_steps == 7
    assert content(tmp_path / "branch" / "checkpoint-12") == content(out / "checkpoint-12")
    edited = (out / "recipe.toml").read_text().replace("lr = 0.01\n", "lr = 0.5\n")
    (out / "recipe.toml").write_text(edited)
    longer = make_recipe(training_lr=0.5, training_steps=14)
    with pytest.raises(ConfigError, match=r"checkpoint-12 .*training.lr=0.01.* 0.5;"):
        train(longer, out, text, monkeypatch, resume="auto")


def test_a_branch_may_change_the_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = make_text(), tmp_path / "run"
    train(make_recipe(), out, text, monkeypatch)
    lower = make_recipe(training_lr=0.001)
    assert train(lower, tmp_path / "branch", text, monkeypatch, resume=str(out / "checkpoint-5")).took_steps == 7
    assert content(tmp_path / "branch" / "checkpoint-12") != content(out / "checkpoint-12")


def test_a_run_with_only_broken_checkpoints_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text, out = make_recipe(training_save_every=5), make_text(), tmp_path / "run"
    train(recipe, out, text, monkeypatch)
    for weights in out.glob("checkpoint-*/model.safetensors"):
        weights.write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CheckpointError, match=r"\b3 checkpoints.*checkpoint-12"),
    ):
        train(recipe, out, text, monkeypatch, resume="auto")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text, out = make_recipe(training_steps=3), make_text(), tmp_path / "run"

    class Second(Observer):
        """Trains in the same folder. Its lock is on another file description, as that of another process would be."""

        tried = 0

        def after_step(self, trainer: Trainer) -> None:
            with pytest.raises(ConfigError, match=f"another process.*{out}"):
                train(recipe, out, text, monkeypatch, resume="auto")
            self.tried += 1

    second = Second()
    train(recipe, out, text, monkeypatch, second)
    assert second.tried == 3
    assert len(losses(out)) == 3
    assert train(recipe, out, text, monkeypatch, resume="auto").took_steps == 0
