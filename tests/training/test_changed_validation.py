"""If validation influences training, a resume may not change what its scores depend on."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import ConfigError, DataError
from longspan.training import run
from longspan.training.observer import ResumeWarning
from longspan.training.observers.validation import Validate
from tests.training.conftest import make_recipe, make_text, train

OLD, NEW = "1" * 64, "2" * 64
PATIENCE = {"training_patience": 3}
TRIGGER = {"training_averaging": "asgd", "training_average_patience": 2}


def resume(out: Path, monkeypatch: pytest.MonkeyPatch, *, held_out: str = OLD, steps: int = 4, **changes: Any) -> int:
    """Train in `out` with the observers of a recipe. Returns the number of steps taken."""
    texts = {"train": make_text(300), "valid": make_text(300, held_out), "test": make_text(300)}
    monkeypatch.setattr(run, "open_text", lambda recipe, split, *_: texts[split])
    recipe = make_recipe(training_steps=steps, training_validate_every=1, training_schedule="constant", **changes)
    return run.train(recipe, out, resume="auto").took_steps


def times(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob("*")}


@pytest.mark.parametrize("deciding", [PATIENCE, TRIGGER])
def test_a_changed_text_is_refused_if_it_influences_training(
    deciding: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume(tmp_path, monkeypatch, steps=2, **deciding)
    before = times(tmp_path)
    with pytest.raises(DataError, match=rf"valid .*{NEW[:12]}.*{OLD[:12]}"):
        resume(tmp_path, monkeypatch, held_out=NEW, **deciding)
    assert times(tmp_path) == before
    assert resume(tmp_path, monkeypatch, **deciding) == 2


def test_a_changed_text_gives_a_warning_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume(tmp_path, monkeypatch, steps=2, **PATIENCE)
    with pytest.warns(ResumeWarning, match="valid") as warned:
        assert resume(tmp_path, monkeypatch, held_out=NEW) == 2
    assert len(warned) == 1


@pytest.mark.parametrize("deciding", [PATIENCE, TRIGGER])
@pytest.mark.parametrize("change", [{"evaluation_memory": 5}, {"training_validate_tokens": 50}])
def test_changed_scoring_is_refused_if_it_influences_training(
    change: dict[str, Any], deciding: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume(tmp_path, monkeypatch, steps=1, **deciding)
    key = next(iter(change)).replace("_", ".", 1)
    with pytest.raises(ConfigError, match=f"{key}="):
        resume(tmp_path, monkeypatch, **deciding, **change)


@pytest.mark.parametrize("change", [{"evaluation_memory": 5}, {"training_validate_tokens": 50}])
def test_changed_scoring_gives_a_warning_otherwise(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume(tmp_path, monkeypatch, steps=1)
    with pytest.warns(ResumeWarning, match=next(iter(change)).replace("_", ".", 1)) as warned:
        assert resume(tmp_path, monkeypatch, steps=2, **change) == 1
    assert len(warned) == 1


def test_no_warning_without_a_change_or_without_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_text(300)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumeWarning)
        for steps in (1, 2):
            resume(tmp_path / "same", monkeypatch, steps=steps)
            recipe = make_recipe(training_steps=steps, evaluation_memory=steps)
            train(recipe, tmp_path / "unscored", text, monkeypatch, resume="auto")


def test_a_checkpoint_without_a_fingerprint_is_accepted() -> None:
    observer = Validate(make_text(300, NEW), 1, decides=True)
    observer.restore({})
    assert observer.facts() == {"fingerprint": NEW}
