"""A training run in a folder: start, resume or branch it, and check that a resume is allowed."""

import dataclasses
import shlex
import signal
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.manifest import MANIFEST, Verified
from longspan.data import BatchStreams, Encoded, open_corpus
from longspan.data.tokenizer_specs import find_tokenizer_spec
from longspan.errors import CheckpointError, ConfigError, DataError
from longspan.models.families import create
from longspan.training import snapshot
from longspan.training.folder import check_folder, find_origin, is_own, locked, read_run_info, write_run_info
from longspan.training.ledger import NotFiniteError
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, ResumeWarning
from longspan.training.observers.average_trigger import AverageTrigger
from longspan.training.observers.checkpoints import Checkpoints
from longspan.training.observers.early_stop import EarlyStop
from longspan.training.observers.metrics import Metrics
from longspan.training.observers.progress import Progress, print_line
from longspan.training.observers.tensorboard import TensorBoard
from longspan.training.observers.validation import Validate
from longspan.training.preflight import preflight
from longspan.training.recipe import DataConfig, EvaluationConfig, Recipe, load_recipe, value_at

RECIPE = snapshot.RECIPE
# What a validation score depends on, apart from the model and the text.
SCORING = {"training.validate_tokens", *(f"evaluation.{key.name}" for key in dataclasses.fields(EvaluationConfig))}
# What a resume may change: limits and observers, not what a step computes.
FREE = {
    *SCORING,
    *(f"data.{key}" for key in ("corpus", "valid", "test")),
    # The vocabulary follows from the text, which is checked by its fingerprint.
    "model.vocabulary",
    *(f"training.{key}" for key in ("steps", "tokens", "seconds", "compile", "cuda_graph", "checkpoint_activations")),
    *(f"training.{key}" for key in ("validate_every", "save_every", "keep", "patience")),
}
# What a branch (a new run from another run's checkpoint) may change in addition: the size of its updates.
TUNABLE = {
    *(f"training.{key}" for key in ("lr", "muon_lr", "muon_momentum", "betas", "epsilon", "weight_decay")),
    *(f"training.{key}" for key in ("schedule", "warmup", "lr_floor", "cooldown", "clip", "spike")),
}


@dataclass(frozen=True)
class Outcome:
    """The result of a training process."""

    out: Path
    step: int
    finished: bool
    interrupted: signal.Signals | None
    took_steps: int
    stopped_early: bool = False

    @property
    def sentence(self) -> str:
        if self.interrupted is not None:
            return (
                f"stopped by {self.interrupted.name} and saved at step {self.step}; "
                f"continue with: longspan train --out {shlex.quote(str(self.out))} --resume auto"
            )
        if self.took_steps == 0:
            return f"{self.out} is already finished (step {self.step})"
        if self.stopped_early:
            return f"stopped early after step {self.step}, because validation did not improve: {self.out}"
        return f"finished after step {self.step}: {self.out}"


def resolve(
    recipe: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    data: str | None = None,
    out: Path | None = None,
    resume: str | None = None,
    seed: int | None = None,
) -> Recipe:
    """The recipe of a command line. Default: that of the run in `out`, or of the checkpoint to resume."""
    if recipe is None:
        places = [*([out] if out else []), *([Path(resume)] if resume not in (None, "auto") else [])]
        recipe = next((place / RECIPE for place in places if (place / RECIPE).is_file()), None)
        if recipe is None:
            raise ConfigError("--recipe is missing; use a file or a name, for example --recipe tiny")
    chosen = load_recipe(recipe, overrides)
    if data is not None:
        chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, corpus=data))
    if seed is not None:
        chosen = dataclasses.replace(chosen, training=dataclasses.replace(chosen.training, seed=seed))
    # Absolute paths, because the run may be resumed from another working directory.
    paths: dict[str, Any] = {
        key: str(Path(path).resolve()) for key, path in chosen.data.paths.items() if Path(path).exists()
    }
    chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, **paths))
    config.require_unicode(chosen.data.corpus, "--data")
    return chosen


def open_text(recipe: Recipe, split: str) -> Encoded:
    data = recipe.data
    if data.tokenizer is None or data.minimum is None:
        return open_corpus(data.corpus, split, data.tokenizer, held_out=data.held_out)
    spec = dataclasses.replace(find_tokenizer_spec(data.tokenizer), minimum=data.minimum)
    return open_corpus(data.corpus, split, spec, held_out=data.held_out)


def make_trainer(
    recipe: Recipe, text: Encoded, device: torch.device, observers: Sequence[Observer] = ()
) -> tuple[Recipe, Trainer]:
    """The recipe with the vocabulary of the text, and a trainer before its first step."""
    recipe = recipe.with_vocabulary(text.tokenizer.size)
    rows = value_at(recipe.training.batch, 0)
    streams = BatchStreams(text.ids, text.starts if recipe.data.documents else [], rows, text.fingerprint, text.name)
    torch.manual_seed(recipe.training.seed)
    model = create(recipe.family, recipe.model, recipe.evaluation_reading())
    return recipe, Trainer(recipe, model, text.tokenizer, streams, device, observers)


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: str | None = None,
    device: torch.device | str = "cpu",
    observers: Sequence[Observer] | None = None,
) -> Outcome:
    """Train in the folder `out` until the recipe's limit. `resume` is 'auto', or the path of a checkpoint or a run."""
    device = torch.device(device)
    out = Path(out)
    check_outside_data(out, recipe.data)
    with locked(out):
        check_folder(out, resume)
        start = find_start(out, resume)
        show = print_line if observers is None else _print_nothing
        show(f"reading {recipe.data.corpus}")
        text = open_text(recipe, "train")
        watching = default_observers(recipe, out, text) if observers is None else list(observers)
        recipe, trainer = make_trainer(recipe, text, device, watching)
        show(f"preparing {recipe.family} with {trainer.model.parameter_count:,} parameters on {device}")
        if (out / RECIPE).is_file():
            check_same(recipe, load_recipe(out / RECIPE), out)
        if start is not None:
            check_start(recipe, start, out)
            snapshot.load(trainer, start)
            if not is_own(start, out):
                for observer in watching:
                    observer.branched()
        before = trainer.step
        if not trainer.finished:
            preflight(trainer)
            write_run_info(out, recipe, text, device, start)
            try:
                trainer.run()
            except NotFiniteError as error:
                raise NotFiniteError(f"{error}; {_fix(out)}") from None
        # After a signal in the last step nothing is left to do.
        signalled = None if trainer.finished else trainer.interrupted
        return Outcome(out, trainer.step, trainer.finished, signalled, trainer.step - before, trainer.stopped_early)


def _print_nothing(_: str) -> None:
    """A caller that passes its own observers gets no other output."""


def _fix(out: Path) -> str:
    if store.numbered(out):
        flags = f"--resume {shlex.quote(str(out))} --out ANOTHER --set training.lr=..."
        return f"check that text, or continue from the last checkpoint at a lower learning rate with {flags}"
    return "check that text, or start in another --out with a lower training.lr"


def default_observers(recipe: Recipe, out: Path, text: Encoded) -> list[Observer]:
    """The observers of a recipe in call order. Checkpoints come last, because they save the others' facts."""
    training = recipe.training
    observers: list[Observer] = [Metrics(out), TensorBoard(out), Progress(text)]
    if training.validate_every:
        held_out = open_corpus(recipe.data.corpus, "valid", text.tokenizer, held_out=recipe.data.held_out)
        if len(held_out) < 2:
            raise DataError(
                f"the valid split of {held_out.name} has {len(held_out)} tokens; use a text with at least 2"
            )
        decides = validation_decides(recipe)
        observers.append(Validate(held_out, training.validate_every, training.validate_tokens, decides=decides))
    if training.patience:
        observers.append(EarlyStop(training.patience))
    if training.average_patience:
        observers.append(AverageTrigger(training.average_patience, training.validate_every))
    return [*observers, Checkpoints(out, training.save_every, training.keep)]


def check_outside_data(out: Path, data: DataConfig) -> None:
    """A run must not be inside the data, because its own files would become part of the text."""
    for given in data.paths.values():
        folder = Path(given).resolve()
        if folder.is_dir() and folder in (out.resolve(), *out.resolve().parents):
            raise ConfigError(f"--out {out} is inside the data folder {given}; use a folder outside of it")


def find_start(out: Path, resume: str | None) -> Verified | None:
    """The checkpoint to resume; None for a new run."""
    if resume is None:
        return None
    newest = store.newest_good(out, keep=snapshot.PARTS)
    own = newest.found
    if own is None and newest.passed_over:
        # A new start would overwrite checkpoints that may still be repaired.
        raise CheckpointError(
            f"all {len(newest.passed_over)} checkpoints in {out} are damaged ({newest.passed_over[0].reason}); "
            "use another --out to start again"
        )
    if resume == "auto":
        return own or find_origin(out)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"--resume {path} does not exist; use a run, a checkpoint, or auto for the run in --out")
    if (path / MANIFEST).is_file():
        found = store.read_folder(path)
        if not set(snapshot.PARTS) <= set(found.files):
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
            f"--out {out} is at {own.path.name}, but --resume is {path}; use another --out to branch from there"
        )
    return found


def check_start(recipe: Recipe, start: Verified, out: Path) -> None:
    """A resume needs the recipe stored in the checkpoint, even if the run's own recipe.toml was edited."""
    if RECIPE not in start.files:
        return
    stored = load_recipe(start.path / RECIPE)
    check_same(recipe, stored, start.path, FREE if is_own(start, out) else FREE | TUNABLE)
    if recipe.training.validate_every and stored.training.validate_every:
        now, then = _flat(recipe), _flat(stored)
        for key in sorted(key for key in SCORING if now.get(key) != then.get(key)):
            change = f"{config.show(then.get(key, 'unset'))} to {config.show(now.get(key, 'unset'))}"
            sentence = f"{key} changes from {change}; validation scores before and after are not comparable"
            warnings.warn(sentence, ResumeWarning, stacklevel=2)


def check_same(recipe: Recipe, stored: Recipe, where: Path, free: Set[str] = FREE) -> None:
    """A run continues with the recipe it started with, except for the keys in `free`.

    If validation scores influence training, the keys that they depend on are not free either.
    """
    now, then = _flat(recipe), _flat(stored)
    free = free - SCORING if validation_decides(recipe) else free
    free = free - {"training.validate_every"} if stored.training.average_patience else free
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key) and key not in free:
            raise ConfigError(
                f"{where} has {key}={config.show(then.get(key, 'unset'))}, but this run has "
                f"{config.show(now.get(key, 'unset'))}; use another --out, or do not change {key}"
            )


def validation_decides(recipe: Recipe) -> bool:
    """Whether validation scores can stop the run or start the averaging."""
    return bool(recipe.training.patience or recipe.training.average_patience)


def _flat(recipe: Recipe) -> dict[str, Any]:
    tables: Mapping[str, Any] = {
        "model": {"family": recipe.family, **config.plain(recipe.model)},
        **{name: config.plain(getattr(recipe, name)) for name in ("data", "training", "evaluation")},
    }
    return {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}


def origin(out: Path) -> list[str]:
    """Sentences about the origin of a run's weights, from run.json: the text and the last process."""
    info = read_run_info(out)
    try:
        data, last = info["data"], info["processes"][-1]
        commit = last["commit"]  # None for an installed package
        text = f"Text: the {data['split']} split of {data['name']}, {data['tokens']:,} tokens"
        return [
            f"{text}, fingerprint {data['fingerprint']}.",
            f"Trained by longspan {last['longspan']}, {f'commit {commit}, ' * bool(commit)}torch {last['torch']}, "
            f"on {last['device']}.",
        ]
    except (ValueError, LookupError, TypeError):
        return []
