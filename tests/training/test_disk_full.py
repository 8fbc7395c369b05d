"""A full disk stops a run with an error and leaves the previous checkpoint complete. Later the run can be resumed."""

import errno
import os
from pathlib import Path

import pytest

from longspan.checkpoints import store
from longspan.errors import LongspanError
from longspan.training import run
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from longspan.training.observers.checkpoints import Checkpoints
from longspan.training.observers.metrics import Metrics
from tests.training.conftest import content, losses, make_recipe, make_text, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))


class Disk:
    """Is full after `room` files; the next one is written in part."""

    def __init__(self, room: int) -> None:
        self.room, self.real = room, store._write_synced

    def write(self, path: Path, what: store.Content) -> store.Entry:
        self.room -= 1
        if self.room < 0:
            path.write_bytes(b"part of the content")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return self.real(path, what)


@pytest.mark.parametrize("room", range(42) if TORTURE else (0, 3, 20))
def test_a_full_disk_leaves_the_previous_checkpoint(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text, out = make_recipe(training_save_every=2), make_text(300), tmp_path / "run"
    with monkeypatch.context() as full:
        full.setattr(store, "_write_synced", Disk(room).write)
        with pytest.raises(LongspanError, match="No space left on device"):
            train(recipe, out, text, full)
    assert not [path for path in out.iterdir() if path.name.startswith(".")], "nothing left over"
    newest = store.newest_good(out)
    assert newest.passed_over == ()
    saved = store.numbered(out)
    assert (newest.found is None) == (not saved)
    if newest.found is not None:
        assert newest.found.path == saved[0]
    assert train(recipe, out, text, monkeypatch, resume="auto").finished
    train(recipe, tmp_path / "full_run", text, monkeypatch)
    assert content(out / "checkpoint-12") == content(tmp_path / "full_run" / "checkpoint-12")
    assert losses(out) == losses(tmp_path / "full_run")


def test_metrics_that_cannot_be_written_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(run, "open_text", lambda recipe, split, *_: make_text(300))

    class FillDisk(Observer):
        def after_step(self, trainer: Trainer) -> None:
            if trainer.step == 4:
                metrics = next(observer for observer in trainer.observers if isinstance(observer, Metrics))
                metrics.files["metrics.jsonl"] = Path("/dev/full").open("w")  # noqa: SIM115 (the run closes it)

    with pytest.raises(LongspanError, match=r"metrics\.jsonl.*No space left on device"):
        run.train(make_recipe(), out, observers=[Metrics(out), Checkpoints(out, 2, 5), FillDisk()])
    newest = store.newest_good(out).found
    assert newest is not None
    assert newest.path.name == "checkpoint-4"
