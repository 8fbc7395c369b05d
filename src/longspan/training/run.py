"""A run is a folder: the recipe as resolved, what it ran on, metrics, checkpoints. It can be left and taken up."""

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
from longspan.data import Encoded, Lanes, open_corpus
from longspan.data.readings import find_reading
from longspan.errors import CheckpointError, ConfigError, DataError
from longspan.models.families import create
from longspan.training import snapshot
from longspan.training.folder import check_folder, claimed, find_origin, is_own, read_about, write_about
from longspan.training.ledger import NotFiniteError
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, ResumeWarning
from longspan.training.observers.average_trigger import AverageTrigger
from longspan.training.observers.checkpoints import Checkpoints
from longspan.training.observers.early_stop import EarlyStop
from longspan.training.observers.metrics import Metrics
from longspan.training.observers.progress import Progress, say
from longspan.training.observers.tensorboard import TensorBoard
from longspan.training.observers.validation import Validate
from longspan.training.recipe import DataConfig, EvaluationConfig, Recipe, load_recipe
from longspan.training.rehearsal import rehearse
from longspan.training.schedules import value_at

RECIPE = snapshot.RECIPE
# What a validation score depends on beside the model and the text.
SCORING = {"training.validate_tokens", *(f"evaluation.{key.name}" for key in dataclasses.fields(EvaluationConfig))}
# What a resume may change: it moves an end or what is watched, not what a step computes.
FREE = {
    *SCORING,
    *(f"data.{key}" for key in ("corpus", "valid", "test")),
    # Another vocabulary comes from another text, and that is told by the text's fingerprint.
    "model.vocabulary",
    *(f"training.{key}" for key in ("steps", "tokens", "seconds", "compile", "record", "checkpoint_activations")),
    *(f"training.{key}" for key in ("validate_every", "save_every", "keep", "patience")),
}
# What a branch, a new run that goes on from another's checkpoint, may change on top: how far its steps go.
TUNABLE = {
    *(f"training.{key}" for key in ("lr", "muon_lr", "muon_momentum", "betas", "epsilon", "weight_decay")),
    *(f"training.{key}" for key in ("schedule", "warmup", "lr_floor", "cooldown", "clip", "spike")),
}


@dataclass(frozen=True)
class Outcome:
    """How a run stands when its process ends."""

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
                f"stopped by {self.interrupted.name} after step {self.step}, which is saved; "
                f"go on with: longspan train --out {shlex.quote(str(self.out))} --resume auto"
            )
        if self.took_steps == 0:
            return f"{self.out} was finished already, after step {self.step}"
        if self.stopped_early:
            return f"stopped after step {self.step}, since held-out text was predicted no better: {self.out}"
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
    """The recipe of a command line; a run or checkpoint that is there already brings its own where none is named."""
    if recipe is None:
        places = [*([out] if out else []), *([Path(resume)] if resume not in (None, "auto") else [])]
        recipe = next((place / RECIPE for place in places if (place / RECIPE).is_file()), None)
        if recipe is None:
            raise ConfigError("no recipe was named; give --recipe NAME or FILE (tiny is one to begin with)")
    chosen = load_recipe(recipe, overrides)
    if data is not None:
        chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, corpus=data))
    if seed is not None:
        chosen = dataclasses.replace(chosen, training=dataclasses.replace(chosen.training, seed=seed))
    # The run may be taken up from another folder.
    paths: dict[str, Any] = {
        key: str(Path(path).resolve()) for key, path in chosen.data.paths.items() if Path(path).exists()
    }
    chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, **paths))
    config.require_unicode(chosen.data.corpus, "--data")
    return chosen


def open_text(recipe: Recipe, split: str) -> Encoded:
    data = recipe.data
    if data.tokens is None or data.minimum is None:
        return open_corpus(data.corpus, split, data.tokens, held_out=data.held_out)
    reading = dataclasses.replace(find_reading(data.tokens), minimum=data.minimum)
    return open_corpus(data.corpus, split, reading, held_out=data.held_out)


def make_trainer(
    recipe: Recipe, text: Encoded, device: torch.device, observers: Sequence[Observer] = ()
) -> tuple[Recipe, Trainer]:
    """A trainer before its first step, and the recipe with the vocabulary of its text."""
    recipe = recipe.with_vocabulary(text.tokenizer.size)
    rows = value_at(recipe.training.batch, 0)
    lanes = Lanes(text.ids, text.starts if recipe.data.documents else [], rows, text.fingerprint, text.name)
    torch.manual_seed(recipe.training.seed)
    model = create(recipe.family, recipe.model)
    return recipe, Trainer(recipe, model, text.tokenizer, lanes, device, observers)


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: str | None = None,
    device: torch.device | str = "cpu",
    observers: Sequence[Observer] | None = None,
) -> Outcome:
    """Train to the recipe's end in the folder `out`; `resume` is 'auto' or the path of a checkpoint or a run."""
    device = torch.device(device)
    out = Path(out)
    check_apart(out, recipe.data)
    with claimed(out):
        check_folder(out, resume)
        start = find_start(out, resume)
        tell = say if observers is None else _say_nothing
        tell(f"reading {recipe.data.corpus}")
        text = open_text(recipe, "train")
        watching = default_observers(recipe, out, text) if observers is None else list(observers)
        recipe, trainer = make_trainer(recipe, text, device, watching)
        tell(f"preparing {recipe.family} with {trainer.model.parameter_count:,} parameters on {device}")
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
            rehearse(trainer)
            write_about(out, recipe, text, device, start)
            try:
                trainer.run()
            except NotFiniteError as error:
                raise NotFiniteError(f"{error}: {_way_on(out)}") from None
        # A signal in the last step leaves nothing to go on with.
        signalled = None if trainer.finished else trainer.interrupted
        return Outcome(out, trainer.step, trainer.finished, signalled, trainer.step - before, trainer.stopped_early)


def _say_nothing(_: str) -> None:
    """Where the observers are chosen by the caller, so is what is said."""


def _way_on(out: Path) -> str:
    if store.numbered(out):
        going_on = f"--resume {shlex.quote(str(out))} --out ANOTHER --set training.lr=..."
        return f"look at that text, or go on from the last checkpoint at a lower rate with {going_on}"
    return "look at that text, or begin in another --out with a lower training.lr"


def default_observers(recipe: Recipe, out: Path, text: Encoded) -> list[Observer]:
    """In the order they are called: what a checkpoint must hold or follow comes before it."""
    training = recipe.training
    observers: list[Observer] = [Metrics(out), TensorBoard(out), Progress(text)]
    if training.validate_every:
        held_out = open_corpus(recipe.data.corpus, "valid", text.tokenizer, held_out=recipe.data.held_out)
        if len(held_out) < 2:
            raise DataError(f"the valid split of {held_out.name} has {len(held_out)} tokens; give it more text")
        decides = validation_decides(recipe)
        observers.append(Validate(held_out, training.validate_every, training.validate_tokens, decides=decides))
    if training.patience:
        observers.append(EarlyStop(training.patience))
    if training.average_patience:
        observers.append(AverageTrigger(training.average_patience, training.validate_every))
    return [*observers, Checkpoints(out, training.save_every, training.keep)]


def check_apart(out: Path, data: DataConfig) -> None:
    """A run inside a folder it reads would be part of its text, which then changes with every step."""
    for given in data.paths.values():
        folder = Path(given).resolve()
        if folder.is_dir() and folder in (out.resolve(), *out.resolve().parents):
            raise ConfigError(f"--out {out} lies inside the data, {given}; choose a folder outside of it")


def find_start(out: Path, resume: str | None) -> Verified | None:
    """The checkpoint to go on from; None for a run that begins."""
    if resume is None:
        return None
    newest = store.newest_good(out, keep=snapshot.PARTS)
    own = newest.found
    if own is None and newest.passed_over:
        # Beginning anew would write over what may still be mended.
        raise CheckpointError(
            f"{out} holds {len(newest.passed_over)} checkpoints and none is whole, since "
            f"{newest.passed_over[0].reason}; choose another --out to begin anew"
        )
    if resume == "auto":
        return own or find_origin(out)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"there is no run or checkpoint {path} to resume; --resume auto takes what --out holds")
    if (path / MANIFEST).is_file():
        found = store.read_folder(path)
        if not set(snapshot.PARTS) <= set(found.files):
            raise CheckpointError(f"{path} is a model alone; a resume needs a checkpoint-N, or the folder of a run")
        found = store.read_folder(path, snapshot.PARTS)
    else:
        there = store.newest_good(path, keep=snapshot.PARTS).found
        if there is None:
            raise CheckpointError(f"{path} holds no whole checkpoint to resume")
        found = there
    if own is not None and own.path.resolve() != found.path.resolve():
        raise ConfigError(
            f"--out {out} has come as far as {own.path.name}, and --resume names {path}; "
            "to branch off from there give another --out"
        )
    return found


def check_start(recipe: Recipe, start: Verified, out: Path) -> None:
    """A checkpoint is gone on from with the recipe it was made by, whatever has become of the run around it."""
    if RECIPE not in start.files:
        return
    stored = load_recipe(start.path / RECIPE)
    check_same(recipe, stored, start.path, FREE if is_own(start, out) else FREE | TUNABLE)
    if recipe.training.validate_every and stored.training.validate_every:
        now, then = _flat(recipe), _flat(stored)
        for key in sorted(key for key in SCORING if now.get(key) != then.get(key)):
            change = f"{key} was {config.show(then.get(key, 'unset'))} and is {config.show(now.get(key, 'unset'))}"
            warnings.warn(f"{change}; scores before and after cannot be compared", ResumeWarning, stacklevel=2)


def check_same(recipe: Recipe, stored: Recipe, where: Path, free: Set[str] = FREE) -> None:
    """A run goes on with the recipe it began with, save for its end and what watches it.

    Where validation scores decide about training, what they depend on must stay as it was too.
    """
    now, then = _flat(recipe), _flat(stored)
    free = free - SCORING if validation_decides(recipe) else free
    free = free - {"training.validate_every"} if stored.training.average_patience else free
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key) and key not in free:
            raise ConfigError(
                f"{where} holds a run with {key}={config.show(then.get(key, 'unset'))}, and this one has "
                f"{config.show(now.get(key, 'unset'))}; choose another --out, or leave {key} as it was"
            )


def validation_decides(recipe: Recipe) -> bool:
    """Whether validation scores end the run or begin the averaging."""
    return bool(recipe.training.patience or recipe.training.average_patience)


def _flat(recipe: Recipe) -> dict[str, Any]:
    tables: Mapping[str, Any] = {
        "model": {"family": recipe.family, **config.plain(recipe.model)},
        **{name: config.plain(getattr(recipe, name)) for name in ("data", "training", "evaluation")},
    }
    return {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}


def origin(out: Path) -> list[str]:
    """What run.json tells of a run's weights, in sentences: the text, and what its last process ran on."""
    about = read_about(out)
    try:
        data, last = about["data"], about["processes"][-1]
        made_by = last["commit"]  # none where an installed longspan trained
        text = f"Text: the {data['split']} split of {data['name']}, {data['tokens']:,} tokens"
        return [
            f"{text}, fingerprint {data['fingerprint']}.",
            f"Trained by longspan {last['longspan']}, {f'commit {made_by}, ' * bool(made_by)}torch {last['torch']}, "
            f"on {last['device']}.",
        ]
    except (ValueError, LookupError, TypeError):
        return []
