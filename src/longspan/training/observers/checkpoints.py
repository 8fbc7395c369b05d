"""Writes checkpoint-N/ and best/."""

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from longspan.checkpoints import store
from longspan.checkpoints.model_folder import save_model
from longspan.checkpoints.weights import full_weights
from longspan.data.cache import signature
from longspan.errors import CheckpointError, DataError
from longspan.training import snapshot
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation

if TYPE_CHECKING:
    from longspan.training.sharded_save import PendingSave


class Checkpoints(Observer):
    """Saves every `every` steps, at the end, and after a signal. Keeps the last `keep` good checkpoints."""

    fact_types: ClassVar = {"best": float}

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep
        self.best = math.inf
        self.good: dict[str, dict[str, list[int]]] = {}
        self.pending: PendingSave | None = None

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        if validation.score >= self.best:
            return
        self.best = validation.score
        score = f"Validation during training: {validation.sentence} on {validation.tokens:,} {validation.unit}."
        notes = [*snapshot.notes(trainer), score]
        with trainer.evaluation_model() as model:
            weights = full_weights(model)

            def save() -> None:
                move_if_broken(self.folder / "best")
                save_model(self.folder / "best", model, trainer.tokenizer, notes=notes, weights=weights, replace=True)

            trainer.processes.first(save)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 or trainer.finished or trainer.interrupted:
            trainer.settle()
            self._finish(trainer)
            path = self.folder / f"checkpoint-{trainer.step}"
            trainer.processes.first(lambda: move_if_broken(path))
            self.pending = snapshot.save(trainer, path)
            if self.pending is None:
                self._saved(path)
            elif trainer.finished or trainer.interrupted:
                self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Wait until the checkpoint that is being written in the background is complete."""
        if self.pending is not None:
            path = self.pending.path
            self.pending.wait()
            self.pending = None
            trainer.processes.first(lambda: self._saved(path))

    def _saved(self, path: Path) -> None:
        self.good[path.name] = _signatures(path)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove checkpoints older than the last `keep` good ones. Broken ones do not count."""
        places = store.numbered(self.folder)
        if len(places) <= self.keep:
            return
        kept = 0
        for path in places:
            if kept < self.keep:
                kept += self._is_good(path)
            else:
                shutil.rmtree(store.locate(path) or path, ignore_errors=True)

    def _is_good(self, path: Path) -> bool:
        """Whether a run can be resumed from it. Reading a large checkpoint takes seconds, so it is read only if its
        files have changed since they were written or last read."""
        now = _signatures(path)
        if self.good.get(path.name) != now and is_complete(path, training=True):
            self.good[path.name] = now
        return self.good.get(path.name) == now

    def facts(self) -> dict[str, Any]:
        return {"best": self.best} if math.isfinite(self.best) else {}

    def restore(self, facts: dict[str, Any]) -> None:
        # If best/ was removed or damaged, the next score is the best.
        self.best = float(facts.get("best", math.inf)) if is_complete(self.folder / "best") else math.inf

    def branched(self) -> None:
        self.best = math.inf  # that score belongs to the other run


def is_complete(path: Path, *, training: bool = False) -> bool:
    """Whether a folder is undamaged and, if asked, a run can be resumed from it."""
    try:
        files = store.read_folder(path).files
        return snapshot.is_resumable(files) if training else True
    except CheckpointError:
        return False


def _signatures(path: Path) -> dict[str, list[int]]:
    """Size and times of every file, which change when the file is written."""
    place = store.locate(path) or path
    try:
        return {file.name: signature(file) for file in place.iterdir()}
    except (OSError, DataError):
        return {}


def move_if_broken(path: Path) -> None:
    """Rename a damaged checkpoint or best/ so that a new one can be written. It is kept for inspection."""
    if path.exists() and not is_complete(path):
        place = path.with_name(f"broken-{path.name}")
        shutil.rmtree(place, ignore_errors=True)
        path.rename(place)
