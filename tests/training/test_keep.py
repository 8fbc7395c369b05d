"""`training.keep`: old checkpoints are removed; broken ones do not count."""

from pathlib import Path

import pytest

from longspan.checkpoints import store
from longspan.checkpoints.store import CheckpointWarning
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from tests.training.conftest import content, make_recipe, make_text, train


def damage(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")


def steps(out: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in store.numbered(out)]


def test_a_broken_checkpoint_ahead_of_the_run_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, full, out = make_text(300), tmp_path / "full", tmp_path / "run"
    constant = {"training_schedule": "constant"}
    train(make_recipe(training_steps=8, **constant), full, text, monkeypatch)
    train(make_recipe(training_steps=8, training_save_every=4, **constant), out, text, monkeypatch)
    damage(out / "checkpoint-8")
    with pytest.warns(CheckpointWarning):
        train(make_recipe(training_steps=6, training_keep=1, **constant), out, text, monkeypatch, resume="auto")
    assert steps(out) == [8, 6]
    assert content(out / "checkpoint-6") == content(full / "checkpoint-6")
    with pytest.warns(CheckpointWarning):
        train(make_recipe(training_steps=8, training_keep=1, **constant), out, text, monkeypatch, resume="auto")
    assert steps(out) == [8]
    assert content(out / "checkpoint-8") == content(full / "checkpoint-8")


class Damages(Observer):
    """Damages checkpoints after a given step, as a faulty disk would."""

    def __init__(self, out: Path, after: int, *broken: int) -> None:
        self.out, self.after, self.broken = out, after, broken

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self.after:
            for step in self.broken:
                damage(self.out / f"checkpoint-{step}")


@pytest.mark.parametrize(
    ("broken", "left"),
    [((4,), [5, 4, 3]), ((4, 3), [5, 4, 3])],
)
def test_a_checkpoint_damaged_during_the_run_does_not_count(
    broken: tuple[int, ...], left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observers are called in order, so the damage happens before step 5 is saved."""
    recipe = make_recipe(training_steps=5, training_keep=2)
    train(recipe, tmp_path, make_text(300), monkeypatch, Damages(tmp_path, 5, *broken))
    assert steps(tmp_path) == left


def test_a_checkpoint_that_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    verify = store.read_folder
    monkeypatch.setattr(store, "read_folder", lambda path, keep=(): read.append(path) or verify(path, keep))
    train(make_recipe(training_steps=5, training_keep=2), tmp_path, make_text(300), monkeypatch)
    assert steps(tmp_path) == [5, 4]
    assert read == []
