"""checkpoint-N/, the last few kept, and best/."""

import math
import shutil
from pathlib import Path
from typing import Any

from longspan.checkpoints import store
from longspan.checkpoints.model_folder import save_model
from longspan.errors import CheckpointError
from longspan.training import snapshot
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation


class Checkpoints(Observer):
    """Saves every `every` steps, at the end, and when a signal asks for a stop; older ones than the last `keep` go."""

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep
        self.best = math.inf

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        if validation.score >= self.best:
            return
        self.best = validation.score
        score = f"{validation.bits:.4f} bits per token on {validation.tokens:,} held-out tokens, as training validates."
        set_aside_if_broken(self.folder / "best")
        with trainer.as_model() as model:
            save_model(
                self.folder / "best", model, trainer.tokenizer, notes=[*snapshot.notes(trainer), score], replace=True
            )

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 or trainer.finished or trainer.interrupted:
            trainer.settle()
            path = self.folder / f"checkpoint-{trainer.step}"
            set_aside_if_broken(path)
            snapshot.save(trainer, path)
            for old in store.numbered(self.folder)[self.keep :]:
                shutil.rmtree(old, ignore_errors=True)

    def facts(self) -> dict[str, Any]:
        return {"best": self.best} if math.isfinite(self.best) else {}

    def restore(self, facts: dict[str, Any]) -> None:
        # A branch, or a run whose best was moved away or damaged, has none to compare with.
        self.best = float(facts.get("best", math.inf)) if is_whole(self.folder / "best") else math.inf


def is_whole(path: Path) -> bool:
    try:
        store.read_folder(path)
    except CheckpointError:
        return False
    return True


def set_aside_if_broken(path: Path) -> None:
    """A damaged checkpoint or best makes way for a whole one, and is kept for whoever asks why."""
    if path.exists() and not is_whole(path):
        place = path.with_name(f"broken-{path.name}")
        shutil.rmtree(place, ignore_errors=True)
        path.rename(place)
