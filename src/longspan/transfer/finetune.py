"""Fine-tune a model on a task: `finetune("runs/wiki", "sst2", "runs/sst2", seeds=3)`.

A run is a training run like any other: a folder with a recipe, metrics, checkpoints and best/, and it resumes exactly.
best/ is the checkpoint with the best dev score. The test split is read once, after training, and its score is stored
in result.json.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import torch

from longspan import config
from longspan.bundled import model_path
from longspan.checkpoints.manifest import Verified
from longspan.checkpoints.model_folder import TOKENIZER, Loaded, load_model, reading_of
from longspan.contract import LanguageModel
from longspan.data.cache import write_json
from longspan.device import find_device
from longspan.errors import ConfigError, counted
from longspan.models.families import create, name_of, outline
from longspan.tokenizers import Tokenizer, tokenizer_from_json
from longspan.training import run
from longspan.training.launch import is_first, launched
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.metrics import Metrics
from longspan.training.observers.progress import Progress
from longspan.training.observers.tensorboard import TensorBoard
from longspan.training.observers.validation import ValidationText
from longspan.training.processes import Processes, own_device
from longspan.training.recipe import SETTINGS, Recipe, build_recipe, find_recipe, recipe_folders, value_at
from longspan.training.resume import RECIPE, validation_decides
from longspan.transfer.batches import ExampleBatches
from longspan.transfer.checks import check_labels, check_run, check_settings, check_tokens, with_words
from longspan.transfer.formats import Sequences
from longspan.transfer.model import TaskModel
from longspan.transfer.predict import Predictor, make_format
from longspan.transfer.results import RESULT, RemoveResult, read_result, write_result
from longspan.transfer.tasks import TaskData, open_task

EPOCHS = 3.0
FOLLOW = {"family", "base_family", "vocabulary", "task", "kind", "labels", "metrics", "texts", "symmetric"}
FOLLOW |= {"choices", "low", "high"}
"""Keys of a TaskConfig that cannot be set, because the model and the task determine them."""
VALIDATIONS, SAVES = 20, 4
"""How often a run is validated and saved, if the recipe does not say."""
WORTH_COMPILING = 500
"""Steps. Compiling the layers takes as long as some hundreds of steps that are not compiled."""


@dataclass(frozen=True)
class TaskValidation(Validation):
    """The dev metrics after `step` steps; `tokens` counts examples, and `nats` is 1 minus the first metric."""

    unit: ClassVar[str] = "examples"
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def sentence(self) -> str:
        return ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())


class ValidateTask(Observer):
    """Computes the dev metrics every few steps and at the end."""

    def __init__(self, data: TaskData, every: int, *, decides: bool) -> None:
        self.examples, self.every = data.dev, every
        self.encoded: list[Sequences] | None = None
        self.text = ValidationText(f"dev rows of {data.task.name}", data.dev_fingerprint, decides)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.finished or (self.every and trainer.step % self.every == 0):
            trainer.settle()
            with trainer.evaluation_model() as model, trainer.autocast():
                assert isinstance(model, TaskModel)
                predictor = Predictor(model, trainer.tokenizer)
                self.encoded = self.encoded or predictor.encode(self.examples, "dev")
                found = predictor.evaluate(self.examples, self.encoded)
            found = trainer.processes.share(found)
            first = next(iter(found.values()))
            trainer.announce(TaskValidation(trainer.step, len(self.examples), 1.0 - first, metrics=found))

    def facts(self) -> dict[str, Any]:
        return self.text.facts()

    def restore(self, facts: dict[str, Any]) -> None:
        self.text.check(facts)


@dataclass(frozen=True)
class TrainedTask:
    """What run.json says about the data."""

    data: TaskData
    split: str = "train"

    @property
    def name(self) -> str:
        return self.data.task.name

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    def __len__(self) -> int:
        return len(self.data.train)


@dataclass(frozen=True)
class Result:
    """The scores of all seeds; `test` is empty for a task without a test split."""

    task: str
    metric: str
    seeds: tuple[int, ...]
    dev: tuple[Mapping[str, float], ...]
    test: tuple[Mapping[str, float], ...]
    predictions: tuple[str, ...] = ()
    """Files with the predictions of test rows without labels, one per seed."""

    def summary(self) -> dict[str, Any]:
        """Means, and standard deviations of several seeds."""
        values: dict[str, Any] = {"task": self.task, "metric": self.metric, "seeds": list(self.seeds)}
        for split, found in (("dev", self.dev), ("test", self.test)):
            first = [scores[self.metric] for scores in found]
            values[split] = mean(first) if first else None
            values[f"{split}_std"] = stdev(first) if len(first) > 1 else None
            values[f"{split}_metrics"] = {name: mean(s[name] for s in found) for name in found[0]} if found else {}
            values[f"{split}_per_seed"] = first
        return values | ({"predictions": list(self.predictions)} if self.predictions else {})


class Interrupted(KeyboardInterrupt):
    """A run that a signal stopped. Its checkpoint is saved."""

    def __init__(self, outcome: run.Outcome) -> None:
        assert outcome.interrupted is not None
        self.signal = outcome.interrupted
        super().__init__(
            f"stopped by {self.signal.name} and saved at step {outcome.step} in {outcome.out}; "
            "continue with the same command and --resume auto"
        )


def finetune(
    model: str | Path | None,
    task: str | Path,
    out: str | Path,
    *,
    source: str | Path | None = None,
    recipe: str | Path = "finetune",
    overrides: Sequence[str] = (),
    epochs: float | None = None,
    seeds: int | Sequence[int] = 1,
    resume: str | None = None,
    from_scratch: bool = False,
    device: torch.device | str = "auto",
) -> Result:
    """Train a classifier or tagger on a task, once per seed, and score dev and test.

    `model` is a model folder or a run; default: the bundled model. `task` is a known name, installed from `source` if
    necessary, or a folder. `out` is the run's folder; with several seeds it contains one run per seed. `epochs`
    (default: 3, unless `overrides` set training.steps) sets training.steps. `from_scratch` keeps the shape of the model
    and draws new weights: the control of every experiment.
    """
    chosen = list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(f"seeds={seeds} must be at least 1, or a list of different seeds")
    data, where, out = open_task(task, source), find_device(device), Path(out)
    base = load_model(model_path(model))
    if len(chosen) > 1 and (out / RECIPE).is_file():
        raise ConfigError(f"{out} is the run of one seed; use another folder for several")
    plans: list[tuple[Path, Recipe]] = []
    for seed in chosen:
        folder = out if len(chosen) == 1 else out / f"seed-{seed}"
        made = resolve(base, data, recipe, overrides, epochs=epochs, seed=seed, task=str(task), device=where)
        if not from_scratch:
            path = str(model_path(model).resolve())
            made = dataclasses.replace(made, training=dataclasses.replace(made.training, init_from=path))
        plans.append((folder, made))
    used = tuple(made.training.seed for _, made in plans)
    if len(set(used)) < len(used):
        raise ConfigError(
            f"training.seed={used[0]} makes all {len(used)} runs identical; leave it out, or train one seed"
        )
    check_labels(data, plans[0][1].model.labels)
    check_settings(plans[0][1])
    for folder, made in plans:
        check_run(made, folder, resume, base.model)
    check_tokens(data.check_held_out(plans[0][1].model.labels), data.task.kind, base.tokenizer)
    dev, test, predictions = [], [], []
    for folder, made in plans:
        found = finetune_once(made, data, folder, base.tokenizer, resume=resume, device=where)
        dev.append(found["dev"])
        test += [found["test"]] if found.get("test") else []
        predictions += [str(folder / found["predictions"])] if found.get("predictions") else []
    result = Result(data.task.name, data.task.metric, used, tuple(dev), tuple(test), tuple(predictions))
    if len(chosen) > 1 and is_first():
        write_json(out / RESULT, result.summary())
    return result


def resolve(
    base: Loaded,
    data: TaskData,
    recipe: str | Path = "finetune",
    overrides: Sequence[str] = (),
    *,
    epochs: float | None = None,
    seed: int = 1,
    task: str = "",
    device: torch.device | str = "cpu",
) -> Recipe:
    """The recipe of a run: that of the file with the model, the task, the seed and the number of steps filled in."""
    changes = config.parse_overrides(overrides)
    given = config.merge(config.read_toml(find_recipe(recipe)), changes)
    if "data" in changes:
        raise ConfigError("keys of data have no effect on a task; leave them out (model.reverse reads texts backwards)")
    for table in ("model", "training"):
        if not isinstance(given.get(table, {}), dict):
            raise ConfigError(f"{table}={given[table]!r:.40} must be a table; set its keys, such as {table}.KEY=VALUE")
    if followed := [key for key in changes.get("model", {}) if key in FOLLOW]:
        raise ConfigError(
            f"model.{followed[0]} follows from the model and the task; leave it out, or set kind, texts, label, "
            "metrics or symmetric in task.toml"
        )
    if "init_from" in changes.get("training", {}):
        raise ConfigError("training.init_from is the model that is fine-tuned; name it as the first argument")
    named = set(changes.get("training", {}))
    if epochs is None and find_recipe(recipe).parent not in recipe_folders():
        named |= {"steps"} & set(given.get("training", {}))  # steps of our recipes only stand for three epochs
    training = with_length(given.get("training", {}), named, data, epochs)
    reading = {k: v for k, v in reading_of(base.model).items() if k in ("segment", *SETTINGS) and k != "pointer"}
    corpus = str(Path(task).resolve()) if Path(task).is_dir() else data.task.name
    values: dict[str, Any] = {**given, "data": {"corpus": corpus}}
    own = dict(given.get("model", {}))
    described = describe_base(base.model, own.pop("base", {}))
    if base.model.classify_at == "both":
        own.setdefault("pooling", "concat")
    values["model"] = own | described | describe_task(data)
    values["training"] = {"seed": seed, **reading, **training}
    made = build_recipe(values, f"finetune-{data.task.name}")
    chosen: dict[str, Any] = {}
    if "cuda_graph" not in training and suits_graphs(made, device):
        chosen["cuda_graph"] = True
    if "compile" not in training and made.training.steps is not None and made.training.steps < WORTH_COMPILING:
        chosen["compile"] = False
    return dataclasses.replace(made, training=dataclasses.replace(made.training, **chosen))


def with_length(training: Mapping[str, Any], named: set[str], data: TaskData, epochs: float | None) -> dict[str, Any]:
    """The training table with the steps of so many epochs, unless the user has `named` them, and with intervals of
    validation and saving that follow from the steps. Tokens and seconds can end a run earlier."""
    if epochs is not None and not 0 < epochs < math.inf:  # NaN included
        raise ConfigError(f"epochs={epochs} must be above 0, and finite")
    if epochs is not None and "steps" in named:
        raise ConfigError(f"epochs={epochs} and training.steps both set the length of the run; use only one of them")
    values, batch = dict(training), training.get("batch", 16)
    if isinstance(batch, list):
        raise ConfigError(f"training.batch={batch} is a schedule, which a task does not support; use one number")
    if isinstance(batch, int) and batch > 0 and "steps" not in named:
        values["steps"] = max(1, round((epochs or EPOCHS) * -(-len(data.train) // batch)))
    steps = values.get("steps")
    if isinstance(steps, int):
        values.setdefault("validate_every", max(1, -(-steps // VALIDATIONS)))
        values.setdefault("save_every", max(1, -(-steps // SAVES)))
    return values


def describe_base(model: LanguageModel, changes: Any = ()) -> dict[str, Any]:
    """The keys of a TaskConfig that describe the wrapped model. Of a TaskModel, its language model is used again.
    `changes` are new rates, such as that of dropout; everything else belongs to the weights."""
    base = model.base if isinstance(model, TaskModel) else model
    plain = config.plain(base.config)
    if not isinstance(changes, Mapping | tuple):
        raise ConfigError(f"model.base={changes!r:.40} must be a table; set its keys, such as model.base.dropout=0.1")
    for key in changes:
        if not isinstance(plain.get(key), float):
            rates = ", ".join(f"model.base.{name}" for name, value in plain.items() if isinstance(value, float))
            raise ConfigError(f"model.base.{key} cannot change, because the weights depend on it; only {rates} can")
    shape = {"base_family": name_of(base), "base": plain | dict(changes)}
    return {"family": "task", "vocabulary": base.config.vocabulary, **shape}


def suits_graphs(recipe: Recipe, device: torch.device | str) -> bool:
    """Whether steps can be captured in CUDA graphs. Short texts are launch-bound without."""
    training = recipe.training
    varies = training.unfreeze_every or training.checkpoint_activations or launched()
    on_gpu = torch.device(device).type == "cuda"
    return on_gpu and not varies and outline(recipe.family, recipe.model).hints.graph_safe


def describe_task(data: TaskData) -> dict[str, Any]:
    """The keys of a TaskConfig that follow from the task and its training labels."""
    task, gold = data.task, [example.label for example in data.train]
    values: dict[str, Any] = {"task": task.name, "kind": task.kind}
    values |= {"metrics": list(task.metrics), "texts": list(task.texts), "symmetric": task.symmetric}
    if task.kind == "similarity":
        scores = [float(score) for score in gold]  # type: ignore[arg-type]
        return values | {"low": min(scores), "high": max(max(scores), min(scores) + 1e-6), "labels": []}
    if task.kind == "choice":
        return values | {"choices": len(task.texts) - 1, "labels": []}
    names: Any = gold if task.kind != "tags" else [tag for tags in gold for tag in tags]  # type: ignore[union-attr]
    return values | {"labels": sorted(set(names))}


def finetune_once(
    recipe: Recipe,
    data: TaskData,
    out: Path,
    tokenizer: Tokenizer,
    *,
    resume: str | None = None,
    device: torch.device | str = "cpu",
    observers: Sequence[Observer] | None = None,
) -> dict[str, Any]:
    """One run: train, choose the best checkpoint on dev, read test once. Returns the contents of result.json."""

    def prepare(start: Verified | None, place: torch.device, processes: Processes) -> run.Prepared:
        if processes.size > 1 and recipe.model.hidden:
            raise ConfigError(
                f"model.hidden={recipe.model.hidden} has batch norm, which needs the complete batch; use one process"
            )
        own = tokenizer if start is None else tokenizer_from_json((start.path / TOKENIZER).read_bytes())
        torch.manual_seed(recipe.training.seed)
        model = create(recipe.family, recipe.model, recipe.evaluation_reading())
        assert isinstance(model, TaskModel)
        if model.base.spelled:
            model.base.spell([own.decode_bytes([token]) for token in range(own.size)])
        if recipe.training.init_from is not None and start is None:
            load_base(model, recipe.training.init_from)
        rows, seed = value_at(recipe.training.batch, 0), recipe.training.seed
        layout = make_format(own, model)
        examples = with_words(layout.encode(data.train, "train"), layout.longest, data.task.name)
        streams = ExampleBatches(examples, rows, seed, data.fingerprint, data.task.name)
        watching = observers if observers is not None else watchers(recipe, data, out, processes)
        return run.Prepared(Trainer(recipe, model, own, streams, place, watching, processes), TrainedTask(data))

    def score() -> dict[str, Any]:
        return read_result(out, data) or write_result(out, data, own_device(torch.device(device)))

    quiet = observers is not None
    outcome = run.run_in_folder(recipe, out, prepare, resume=resume, device=device, quiet=quiet, afterwards=score)
    if outcome.interrupted is not None:
        raise Interrupted(outcome)
    found = read_result(out, data)
    assert found is not None
    return found


def watchers(recipe: Recipe, data: TaskData, out: Path, processes: Processes) -> list[Observer]:
    training, observers = recipe.training, list[Observer]()
    if processes.is_first:
        held = " (held out from train)" if data.held_out else ""
        sizes = counted(len(data.train), "training example"), counted(len(data.dev), "dev example")
        about = f"{data.task.name}: {', '.join(sizes)}{held}"
        observers += [Metrics(out), TensorBoard(out), Progress([about], in_bits=False), RemoveResult(out)]
    observers.append(ValidateTask(data, training.validate_every, decides=validation_decides(recipe)))
    return [*observers, *run.last_observers(training, out)]


def load_base(model: TaskModel, path: str) -> None:
    """Copy the weights of a language model, or of the one inside of another TaskModel."""
    found = load_model(Path(path)).model
    source = found.base if isinstance(found, TaskModel) else found
    try:
        model.base.load_state_dict(source.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the weights of {path} do not fit this model config: {reason[:200]}") from None
