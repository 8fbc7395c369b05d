"""One recipe of a comparison: trained to the end of the budget, then scored on held-out text as its recipe says."""

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.model_folder import Loaded, load_model, reading_of
from longspan.data import Encoded, open_corpus
from longspan.errors import DataError, LongspanError, TrainingError
from longspan.experiments.compare.budget import Budget
from longspan.experiments.compare.peak import peak_memory, release_memory
from longspan.experiments.compare.variants import Variant
from longspan.models.families import family, outline
from longspan.scoring.losses import Progress
from longspan.scoring.score import score
from longspan.training import run
from longspan.training.observers.metrics import read_lines
from longspan.training.recipe import Recipe

SPLIT = "valid"
LOGS = "logs"
"""The folder for recipes and output of members that are trained in processes of their own."""


@dataclass(frozen=True)
class Setup:
    """What all members share: text, budget, device, and how many held-out tokens are scored (0: all)."""

    data: str
    budget: Budget
    device: torch.device
    dtype: torch.dtype
    overrides: tuple[str, ...] = ()
    seed: int | None = None
    tokens: int = 0


@dataclass(frozen=True)
class TrainedMember:
    """A trained member and the held-out text it is measured on."""

    name: str
    recipe: Recipe
    loaded: Loaded
    held_out: Encoded


def read_recipe(variant: Variant, setup: Setup) -> Recipe:
    """The recipe of a variant with the text, seed and limit of the comparison instead of its own."""
    limit = [f"training.{name}={value}" for name, value in setup.budget.limit.items()]
    seed = setup.seed if variant.seed is None else variant.seed
    overrides = [*setup.overrides, *variant.overrides, *limit]
    chosen = run.resolve(variant.file, overrides, data=setup.data, seed=seed)
    chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, valid=None, test=None))
    if limit:
        others: dict[str, Any] = {"steps": None, "tokens": None, "seconds": None} | setup.budget.limit
        chosen = dataclasses.replace(chosen, training=dataclasses.replace(chosen.training, **others))
    return chosen


def count_parameters(recipe: Recipe) -> int:
    """The number of parameters, with the vocabulary of the recipe's text. A ConfigError for a model without bits."""
    fitted = recipe.with_vocabulary(run.open_text(recipe, "train").tokenizer.size)
    model = outline(fitted.family, fitted.model)
    model.require_next_token()
    return model.parameter_count


def train(recipe: Recipe, out: Path, device: torch.device) -> tuple[run.Outcome, int | None]:
    """Train to the end of the recipe, resuming the run in `out`; with peak memory, or None if no step was taken."""
    if device.type == "cuda" or recipe.training.compile:
        # torch limits compiled graphs per function, and earlier members would use up the limit.
        torch.compiler.reset()
    problem = ""
    with peak_memory(device) as peak:
        try:
            outcome = run.train(recipe, out, resume="auto", device=device)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            problem = f"out of memory on {device} in training; lower training.batch, or raise training.accumulate"
    if problem:
        # Raised only here: the traceback of the error keeps the tensors alive.
        release_memory(device)
        raise TrainingError(problem)
    return outcome, peak.bytes if outcome.took_steps else None


def training_command(recipe: Recipe, folder: Path, name: str, device: torch.device) -> list[str]:
    """The command that trains a member in a process of its own, to the end of its recipe, which it writes."""
    file = folder / LOGS / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(recipe.to_toml(), encoding="utf-8")
    where = ["--recipe", str(file), "--out", str(folder / name), "--resume", "auto", "--device", str(device)]
    return [sys.executable, "-m", "longspan", "train", *where]


def is_finished(recipe: Recipe, out: Path) -> bool:
    """Whether the run has reached its last step. A run with a limit in seconds must be opened to know."""
    steps = recipe.training.steps
    return steps is not None and store.locate(out / f"checkpoint-{steps}") is not None


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def training_speed(out: Path) -> float | None:
    """Median tokens per second over the steps, without validation and saving."""
    lines = read_lines(out / "metrics.jsonl")
    speeds = [line["tokens_per_second"] for line in lines if isinstance(line.get("tokens_per_second"), float)]
    return float(np.median(speeds)) if speeds else None


def open_member(name: str, recipe: Recipe, out: Path, setup: Setup) -> TrainedMember:
    """The trained model with the evaluation settings of its recipe."""
    used = family(recipe.family).settings
    settings = {key: value for key, value in config.plain(recipe.evaluation_reading()).items() if key in used}
    loaded = load_model(out, overrides=settings, device=setup.device, dtype=setup.dtype)
    data = recipe.data
    text = open_corpus(data.corpus, SPLIT, loaded.tokenizer, field=data.field, encoding=data.encoding)
    return TrainedMember(name, recipe, loaded, text)


def score_member(one: TrainedMember, tokens: int, progress: Progress | None = None) -> dict[str, Any]:
    """The score of the held-out text: as a stream, or with a sliding window if the model has no memory."""
    model, text = one.loaded.model, one.held_out
    try:
        found = score(model, text.excerpt(0, tokens or None), progress=progress)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        segment = model.reading.segment
        raise LongspanError(
            f"out of memory while scoring segments of {segment} tokens; lower evaluation.segment"
        ) from None
    if not math.isfinite(found.nats):
        raise DataError(f"its held-out loss is {found.nats}, not a finite number; lower training.lr")
    return {
        "bits": found.bits,
        "unit": one.loaded.tokenizer.unit,
        "bits_per_byte": found.bits if one.loaded.tokenizer.unit == "byte" else found.bits * len(text) / text.bytes,
        "scored": found.scored,
        "method": found.method,
        "memory": 0,
        "pointer": 0,
        **reading_of(model),
        "learned": model.facts(),
    }
