"""The checkpoint that a run continues from, and what a resume may change."""

import dataclasses
import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.manifest import MANIFEST, Verified
from longspan.errors import CheckpointError, ConfigError, counted
from longspan.training import snapshot
from longspan.training.folder import find_origin, is_own
from longspan.training.observer import ResumeWarning
from longspan.training.recipe import EvaluationConfig, Recipe, load_recipe

RECIPE = snapshot.RECIPE
# What a validation score depends on, apart from the model and the text.
SCORING = {"training.validate_tokens", *(f"evaluation.{key.name}" for key in dataclasses.fields(EvaluationConfig))}
# What a resume may change: limits and observers, not what a step computes.
FREE = {
    *SCORING,
    *(f"data.{key}" for key in ("corpus", "valid", "test", "field", "encoding")),
    # The vocabulary follows from the text, which is checked by its fingerprint.
    "model.vocabulary",
    "training.init_from",
    *(f"training.{key}" for key in ("steps", "tokens", "seconds", "compile", "cuda_graph")),
    *(f"training.{key}" for key in ("checkpoint_activations", "parallel")),
    *(f"training.{key}" for key in ("validate_every", "save_every", "keep", "patience")),
}
# What a branch (a new run from another run's checkpoint) may change in addition: the size of its updates.
TUNABLE = {
    "training.embedding_rate",
    *(f"training.{key}" for key in ("lr", "muon_lr", "muon_momentum", "betas", "epsilon", "weight_decay")),
    *(f"training.{key}" for key in ("schedule", "warmup", "lr_floor", "cooldown", "layer_decay", "clip", "spike")),
}


def find_start(out: Path, resume: str | None) -> Verified | None:
    """The checkpoint to resume; None for a new run."""
    if resume is None:
        return None
    newest = store.newest_good(out, keep=snapshot.PARTS)
    own = newest.found
    if own is None and newest.passed_over:
        # A new start would overwrite checkpoints that may still be repaired.
        raise CheckpointError(
            f"{out} has {counted(len(newest.passed_over), 'checkpoint')}, all damaged ({newest.passed_over[0].reason});"
            " start again in another folder"
        )
    if resume == "auto":
        return own or find_origin(out)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(
            f"there is no {path} to resume from; use a run, a checkpoint, or 'auto' for the run in {out}"
        )
    if (path / MANIFEST).is_file():
        found = store.read_folder(path)
        if not snapshot.is_resumable(found.files):
            raise CheckpointError(
                f"{path} is a model without training state; resume from a checkpoint-N or the folder of a run"
            )
        found = store.read_folder(path, snapshot.PARTS)
    else:
        there = store.newest_good(path, keep=snapshot.PARTS).found
        if there is None:
            raise CheckpointError(f"{path} has no complete checkpoint; choose another run or checkpoint to resume")
        found = there
    if own is not None and own.path.resolve() != found.path.resolve():
        raise ConfigError(
            f"{out} is at {own.path.name}, not at {path}; resume with 'auto', or branch from {path} into another folder"
        )
    return found


def check_start(recipe: Recipe, start: Verified, out: Path) -> None:
    """A resume needs the recipe stored in the checkpoint, even if the run's own recipe.toml was edited."""
    if RECIPE not in start.files:
        return
    stored = load_recipe(start.path / RECIPE)
    check_same(recipe, stored, start.path, FREE if is_own(start, out) else FREE | TUNABLE)
    if recipe.training.validate_every and stored.training.validate_every:
        now, then = flat(recipe), flat(stored)
        for key in sorted(key for key in SCORING if now.get(key) != then.get(key)):
            change = f"{config.show(then.get(key, 'unset'))} to {config.show(now.get(key, 'unset'))}"
            sentence = f"{key} changes from {change}; validation scores before and after are not comparable"
            warnings.warn(sentence, ResumeWarning, stacklevel=2)


def check_same(recipe: Recipe, stored: Recipe, where: Path, free: Set[str] = FREE) -> None:
    """A run continues with the recipe it started with, except for the keys in `free`.

    If validation scores influence training, the keys that they depend on are not free either.
    """
    now, then = flat(recipe), flat(stored)
    free = free - SCORING if validation_decides(recipe) else free
    free = free - {"training.validate_every"} if stored.training.average_patience else free
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key) and key not in free:
            raise ConfigError(
                f"{where} has {key}={config.show(then.get(key, 'unset'))}, but this run has "
                f"{config.show(now.get(key, 'unset'))}; use another folder, or do not change {key}"
            )


def validation_decides(recipe: Recipe) -> bool:
    """Whether validation scores can stop the run or start the averaging."""
    return bool(recipe.training.patience or recipe.training.average_patience)


def flat(recipe: Recipe) -> dict[str, Any]:
    """All values of a recipe by their keys, such as training.lr."""
    tables: Mapping[str, Any] = {
        "model": {"family": recipe.family, **config.plain(recipe.model)},
        **{name: config.plain(getattr(recipe, name)) for name in ("data", "training", "evaluation")},
    }
    return {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
