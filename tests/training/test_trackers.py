"""Weights & Biases and MLflow, offline."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longspan.errors import ConfigError, TrainingError
from longspan.training import run
from longspan.training.observer import Observer, Validation
from longspan.training.observers.trackers import TrackerWarning, make_tracker
from tests.training.conftest import losses, make_recipe, make_text, train


class Validates(Observer):
    def after_step(self, trainer: Any) -> None:
        if trainer.step == 2:
            trainer.announce(Validation(2, 16, 3.5))


def test_mlflow_has_the_metrics_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for steps in (3, 5):
        recipe = make_recipe(training_steps=steps, training_schedule="constant")
        resume = {"resume": "auto"} if steps == 5 else {}
        train(recipe, tmp_path, make_text(), monkeypatch, make_tracker("mlflow", tmp_path), Validates(), **resume)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    identity = (tmp_path / "mlflow_run.txt").read_text()
    curve = {each.step: each.value for each in client.get_metric_history(identity, "training/loss")}
    assert curve == pytest.approx(dict(enumerate(losses(tmp_path), start=1)))
    assert len(curve) == 5
    found = client.get_run(identity)
    assert found.data.metrics["validation/loss"] == 3.5
    assert found.data.params["model.width"] == "16"
    assert found.info.status == "FINISHED"


def test_wandb_gets_every_step_and_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own writer is a separate process, so this test replaces `wandb.init` and keeps what it is given."""
    wandb = pytest.importorskip("wandb")
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int | None = None) -> None:
            calls.append((step, values))

        def finish(self, exit_code: int) -> None:
            calls.append(exit_code)

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    recipe = make_recipe(training_steps=3, training_schedule="constant")
    train(recipe, tmp_path, make_text(), monkeypatch, make_tracker("wandb", tmp_path), Validates())
    options, *steps, code = calls
    assert options["id"] == (tmp_path / "wandb_run.txt").read_text()
    assert (options["resume"], options["config"]["model"]["width"]) == ("allow", 16)
    curve = [values["training/loss"] for _, values in steps if "training/loss" in values]
    assert curve == pytest.approx(losses(tmp_path))
    assert {"validation/loss": 3.5, "validation/bits": pytest.approx(5.0494, abs=1e-3), "validation/step": 2} in [
        v for _, v in steps
    ]
    assert code == 0


@pytest.mark.slow
def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe = make_recipe(training_steps=2, training_schedule="constant")
    train(recipe, tmp_path, make_text(), monkeypatch, make_tracker("wandb", tmp_path))
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert next(folder.glob("*.wandb")).stat().st_size > 0


class Broken:
    """A package of a tracker, or a part of it, whose method `fails` raises an error. Other methods return itself."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.call(name)

    def call(self, name: str) -> Any:
        if name in self.fails:
            raise ConnectionError(f"no answer to {name}")
        return self


class BrokenMLflow(Broken):
    def __init__(self, *fails: str) -> None:
        super().__init__(*fails)
        self.entities = SimpleNamespace(Param=lambda *given: given, Metric=lambda *given: given)
        self.utils = SimpleNamespace(time=SimpleNamespace(get_current_time_millis=lambda: 0))
        self.experiment_id, self.info = "1", SimpleNamespace(run_id="2")


@pytest.mark.parametrize(
    ("name", "made", "begin", "log", "end"),
    [
        ("wandb", Broken, "init", "log", "finish"),
        ("mlflow", BrokenMLflow, "create_run", "log_batch", "set_terminated"),
    ],
)
def test_an_error_of_a_tracker_is_one_sentence(
    name: str, made: type, begin: str, log: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the end is a warning, and does not replace the error that ended the run."""

    def run_with(out: str, *fails: str) -> None:
        monkeypatch.setitem(sys.modules, name, made(*fails))
        recipe = make_recipe(training_steps=2, training_schedule="constant")
        train(recipe, tmp_path / out, make_text(), monkeypatch, make_tracker(name, tmp_path / out), Validates())

    for failing in (begin, log):
        with pytest.raises(TrainingError, match=f"no answer to {failing}") as caught:
            run_with(failing, failing)
        assert "\n" not in str(caught.value)
    with pytest.raises(TrainingError, match=f"no answer to {log}"), pytest.warns(TrackerWarning, match=end):
        run_with("both", log, end)
    with pytest.warns(TrackerWarning, match=f"no answer to {end}"):
        run_with("end", end)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"longspan\[{name}\]"):
        run.train(make_recipe(), tmp_path / "run", track=[name])
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wand"):
        run.train(make_recipe(), tmp_path / "run", track=["wand"])
