"""A training run in a folder: start, resume or branch it, and check that a resume is allowed."""

import dataclasses
import functools
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.manifest import Verified
from longspan.checkpoints.model_folder import TOKENIZER, load_model
from longspan.contract import LanguageModel
from longspan.data import TOKENIZER_SPECS, BatchStreams, Encoded, TokenizerSpec, describe_all, open_corpus
from longspan.data.tokenizer_specs import find_tokenizer_spec
from longspan.errors import ConfigError, DataError, counted
from longspan.models.families import create, name_of
from longspan.terminal import progress_line
from longspan.tokenizers import Tokenizer, tokenizer_from_json
from longspan.training import snapshot
from longspan.training.folder import (
    TrainedOn,
    check_folder,
    is_own,
    locked,
    read_run_info,
    write_run_info,
)
from longspan.training.launch import launched, remember_start, restart_count, started_before
from longspan.training.ledger import NotFiniteError
from longspan.training.loop import Trainer
from longspan.training.nodes import (
    check_folder_is_shared,
    check_recipe_is_equal,
    check_step_is_equal,
    check_text_is_equal,
)
from longspan.training.observer import Observer
from longspan.training.observers.average_trigger import AverageTrigger
from longspan.training.observers.checkpoints import Checkpoints
from longspan.training.observers.early_stop import EarlyStop
from longspan.training.observers.metrics import Metrics
from longspan.training.observers.progress import Progress, print_line
from longspan.training.observers.tensorboard import TensorBoard
from longspan.training.observers.trackers import check_trackers, make_tracker
from longspan.training.observers.validation import Validate
from longspan.training.preflight import preflight
from longspan.training.processes import ALONE, Processes, joined, own_device
from longspan.training.recipe import DataConfig, Recipe, TrainingConfig, load_recipe, value_at
from longspan.training.resume import check_same, check_start, find_start, validation_decides

RECIPE = snapshot.RECIPE


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
            command = f"longspan train --out {shlex.quote(str(self.out))} --resume auto"
            if launched():
                command = f"torchrun ... -m {command}"
            return f"stopped by {self.interrupted.name} and saved at step {self.step}; continue with: {command}"
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
    init_from: Path | None = None,
) -> Recipe:
    """The recipe of a command line. Default: that of the run in `out`, or of the checkpoint to resume.

    `init_from` is a model to start from. It replaces the recipe's model.
    """
    if recipe is None:
        places = [*([out] if out else []), *([Path(resume)] if resume not in (None, "auto") else [])]
        recipe = next((place / RECIPE for place in places if (place / RECIPE).is_file()), None)
        if recipe is None:
            if out is not None and resume == "auto":
                raise ConfigError(
                    f"there is no run in {out} to resume; to start one, choose a recipe, for example tiny"
                )
            raise ConfigError("no recipe is given; choose a recipe by name or file, for example tiny")
    if init_from is None:
        chosen = load_recipe(recipe, overrides)
    else:
        chosen = starting_from(init_from, recipe, overrides)
    if data is not None:
        chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, corpus=data))
    if seed is not None:
        chosen = dataclasses.replace(chosen, training=dataclasses.replace(chosen.training, seed=seed))
    # Absolute paths, because the run may be resumed from another working directory.
    tokenizer = chosen.data.tokenizer
    named = {} if tokenizer in (None, *TOKENIZER_SPECS) else {"tokenizer": str(tokenizer)}
    paths: dict[str, Any] = {
        key: str(Path(path).resolve()) for key, path in (chosen.data.paths | named).items() if Path(path).exists()
    }
    chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, **paths))
    config.require_unicode(chosen.data.corpus, "data.corpus")
    return chosen


def starting_from(path: Path, recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that trains the model at `path` further: with its family and config, which overrides may change."""
    found = load_model(path)
    given = config.parse_overrides(overrides).get("model")
    if isinstance(given, dict) and given.get("family", name_of(found.model)) != name_of(found.model):
        raise ConfigError(
            f"model.family={config.shown(given['family'])} cannot start from {path}, which is {name_of(found.model)}; "
            "leave it out"
        )
    described = {"family": name_of(found.model), **config.plain(found.model.config)}
    chosen = load_recipe(recipe, overrides, described)
    training = dataclasses.replace(chosen.training, init_from=str(path.resolve()))
    return dataclasses.replace(chosen, training=training)


def load_initial(model: LanguageModel, path: str, tokenizer: Tokenizer) -> None:
    """Copy the weights of the model at `path`, which must have this tokenizer."""
    initial = load_model(Path(path))
    if initial.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"the tokenizer of the text ({tokenizer.kind}, {tokenizer.size} tokens) differs from that of the "
            f"model {path} ({initial.tokenizer.kind}, {initial.tokenizer.size} tokens); leave out "
            "data.tokenizer to use that of the model"
        )
    try:
        model.load_state_dict(initial.model.state_dict())
    except RuntimeError:
        changed = _changed_shape(model, initial.model)
        raise ConfigError(
            f"the weights of {path} do not fit: {changed or 'the shapes differ'}; keep the settings of that model"
        ) from None


def _changed_shape(model: LanguageModel, initial: LanguageModel) -> str:
    """The settings in which a model differs from the one it starts from, except rates, which change no shape."""
    new, old = vars(model.config), vars(initial.config)
    return ", ".join(
        f"model.{key}={config.show(new[key])} instead of {config.show(old[key])}"
        for key in new
        if key in old and new[key] != old[key] and not isinstance(new[key], float)
    )


def open_text(recipe: Recipe, split: str, tokenizer: Tokenizer | None = None) -> Encoded:
    """A split of the recipe's text. Default `tokenizer`: that of the recipe, or of the model it starts from."""
    data = recipe.data
    if tokenizer is None and data.tokenizer is None and recipe.training.init_from is not None:
        tokenizer = load_model(Path(recipe.training.init_from)).tokenizer
    chosen: Tokenizer | TokenizerSpec | str | None = tokenizer or data.tokenizer
    if tokenizer is None and data.tokenizer is not None and data.minimum is not None:
        chosen = dataclasses.replace(find_tokenizer_spec(data.tokenizer), minimum=data.minimum)
    options: dict[str, Any] = {"held_out": data.held_out, "field": data.field, "encoding": data.encoding}
    with progress_line(f"encoding {data.corpus}") as progress:
        text = open_corpus(data.corpus, split, chosen, progress=progress, **options)
    text = text.by_sentence() if data.sentences else text
    return text.reversed() if data.reverse else text


def make_trainer(
    recipe: Recipe,
    text: Encoded,
    device: torch.device,
    observers: Sequence[Observer] = (),
    processes: Processes = ALONE,
    *,
    resumed: bool = False,
) -> tuple[Recipe, Trainer]:
    """The recipe with the vocabulary of the text, and a trainer before its first step, or to be `resumed`."""
    recipe = recipe.with_vocabulary(text.tokenizer.size)
    rows = value_at(recipe.training.batch, 0)
    streams = BatchStreams(
        text.ids,
        text.starts if recipe.data.documents else [],
        rows,
        text.fingerprint,
        text.name,
        recipe.training.overlap,
    )
    torch.manual_seed(recipe.training.seed)
    model = create(recipe.family, recipe.model, recipe.evaluation_reading())
    if model.spelled:
        model.spell([text.tokenizer.decode_bytes([token]) for token in range(text.tokenizer.size)])
    if recipe.training.init_from is not None and not resumed:
        load_initial(model, recipe.training.init_from, text.tokenizer)
    return recipe, Trainer(recipe, model, text.tokenizer, streams, device, observers, processes)


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: str | None = None,
    device: torch.device | str = "cpu",
    observers: Sequence[Observer] | None = None,
    track: Sequence[str] = (),
) -> Outcome:
    """Train in the folder `out` until the recipe's limit. `resume` is 'auto', or the path of a checkpoint or a run.
    `track` names trackers that get the metrics too: wandb, mlflow."""
    check_trackers(track)
    out = Path(out)
    check_outside_data(out, recipe.data)

    def prepare(start: Verified | None, place: torch.device, processes: Processes) -> Prepared:
        # A run that started from a model is resumed without it.
        own = [stored_tokenizer(start)] if start is not None and recipe.training.init_from is not None else []
        text = processes.in_turn(lambda: open_text(recipe, "train", *own))
        check_text_is_equal(text.name, text.fingerprint, processes)
        watching = observers
        if watching is None:
            watching = processes.in_turn(lambda: default_observers(recipe, out, text, processes, track))
        _, trainer = make_trainer(recipe, text, place, watching, processes, resumed=start is not None)
        return Prepared(trainer, text)

    return run_in_folder(recipe, out, prepare, resume=resume, device=device, quiet=observers is not None)


@dataclass(frozen=True)
class Prepared:
    """A trainer before its first step, and what it is trained on."""

    trainer: Trainer
    data: TrainedOn


Prepare = Callable[[Verified | None, torch.device, Processes], Prepared]
"""Reads the data and makes the trainer of a new run or, given its checkpoint, of one that is resumed."""


def run_in_folder(
    recipe: Recipe,
    out: Path,
    prepare: Prepare,
    *,
    resume: str | None = None,
    device: torch.device | str = "cpu",
    quiet: bool = False,
    afterwards: Callable[[], object] | None = None,
) -> Outcome:
    """Start or resume the run in the folder `out`: lock it, check it, restore the trainer and run it. When it has
    finished, the first process calls `afterwards` while the others wait."""
    device = own_device(torch.device(device))
    with joined(device) as processes, ExitStack() as stack:
        given = resume
        check_recipe_is_equal(recipe, processes)
        restarts = int(processes.exchange([restart_count()]).max())
        resume = processes.share(processes.first(lambda: _open_folder(out, given, stack, processes, restarts)))
        check_folder_is_shared(out, processes)
        start = find_start(out, resume)
        show = print_line if not quiet and processes.is_first else _print_nothing
        show(f"reading {recipe.data.corpus}")
        prepared = prepare(start, device, processes)
        trainer = prepared.trainer
        recipe, watching = trainer.recipe, trainer.observers
        where = f"{processes.size} x {device.type}" if processes.size > 1 else device
        show(f"preparing {recipe.family} with {trainer.model.parameter_count:,} parameters on {where}")
        if (out / RECIPE).is_file():
            check_same(recipe, load_recipe(out / RECIPE), out)
        if start is not None:
            check_start(recipe, start, out)
            snapshot.load(trainer, start)
            if not is_own(start, out):
                for observer in watching:
                    observer.branched()
        before = trainer.step
        check_step_is_equal(before, out, processes)
        if not trainer.finished:
            preflight(trainer)
            made = recipe
            processes.first(lambda: write_run_info(out, made, prepared.data, device, start, processes.size))
            try:
                trainer.run()
            except NotFiniteError as error:
                advice = ("check the text of that batch, or " if error.batch else "") + _restart(recipe, out)
                raise NotFiniteError(f"{error}; {advice}", error.batch) from None
        # After a signal in the last step nothing is left to do.
        signalled = None if trainer.finished else trainer.interrupted
        outcome = Outcome(out, trainer.step, trainer.finished, signalled, trainer.step - before, trainer.stopped_early)
        if afterwards is not None and signalled is None:
            del prepared, trainer, watching  # their memory on the device
            processes.first(afterwards)
        return outcome


def _open_folder(out: Path, resume: str | None, stack: ExitStack, processes: Processes, restarts: int) -> str | None:
    """Lock the folder until the end of the run and check it. Returns what to resume: after a restart by torchrun, the
    run itself."""
    stack.enter_context(locked(out))
    if started_before(processes.launch, out, restarts) and (out / RECIPE).is_file():
        resume = "auto"
    check_folder(out, resume)
    remember_start(processes.launch, out)
    return resume


def _print_nothing(_: str) -> None:
    """A caller that passes its own observers gets no other output."""


def _restart(recipe: Recipe, out: Path) -> str:
    if store.numbered(out) and recipe.family != "task":
        command = f"longspan train --resume {shlex.quote(str(out))} --out ANOTHER --set training.lr=..."
        return f"continue from the last checkpoint at a lower learning rate: {command}"
    return "start in another folder with a lower training.lr"


def default_observers(
    recipe: Recipe, out: Path, text: Encoded, processes: Processes = ALONE, track: Sequence[str] = ()
) -> list[Observer]:
    """The observers of a recipe in call order. Only the first process prints and writes metrics."""
    training = recipe.training
    observers: list[Observer] = []

    @functools.cache  # the valid split is described and scored
    def opened(split: str) -> Encoded:
        return open_text(recipe, split, text.tokenizer)

    if processes.is_first:
        observers += [Metrics(out), TensorBoard(out), Progress(describe_all(text, opened))]
        observers += [make_tracker(name, out) for name in track]
    if training.validate_every:
        held_out = opened("valid")
        if len(held_out) < 2:
            raise DataError(
                f"the valid split of {held_out.name} has {counted(len(held_out), 'token')}; use a split with at least 2"
            )
        decides = validation_decides(recipe)
        observers.append(Validate(held_out, training.validate_every, training.validate_tokens, decides=decides))
    return [*observers, *last_observers(training, out)]


def last_observers(training: TrainingConfig, out: Path) -> Iterator[Observer]:
    """Those that act on validations, and the checkpoints, which come last because they save the others' facts."""
    if training.patience:
        yield EarlyStop(training.patience)
    if training.average_patience:
        yield AverageTrigger(training.average_patience, training.validate_every)
    yield Checkpoints(out, training.save_every, training.keep)


def check_outside_data(out: Path, data: DataConfig) -> None:
    """A run must not be inside the data, because its own files would become part of the text."""
    for given in data.paths.values():
        folder = Path(given).resolve()
        if folder.is_dir() and folder in (out.resolve(), *out.resolve().parents):
            raise ConfigError(f"{out} is inside the data folder {given}; use a folder outside of it")


def stored_tokenizer(start: Verified) -> Tokenizer:
    return tokenizer_from_json((start.path / TOKENIZER).read_bytes())


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
