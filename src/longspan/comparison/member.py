"""One recipe of a group: trained to the budget's end, then scored on held-out text in its own best way."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspan.checkpoints.model_folder import Loaded, load_model
from longspan.comparison.budget import Budget
from longspan.comparison.peak import give_back, peak_memory
from longspan.data import Encoded, open_corpus
from longspan.errors import DataError, LongspanError, TrainingError
from longspan.evaluation.likelihood import Tally, slides, sliding_losses, stream_losses
from longspan.models.families import outline
from longspan.training import run
from longspan.training.observers.metrics import read_lines
from longspan.training.recipe import Recipe

SPLIT = "valid"


@dataclass(frozen=True)
class Terms:
    """What holds for every member: the text, the budget, the machine, how many held-out tokens are scored (0: all)."""

    data: str
    budget: Budget
    device: torch.device
    dtype: torch.dtype
    overrides: tuple[str, ...] = ()
    seed: int | None = None
    tokens: int = 0


@dataclass(frozen=True)
class Opened:
    """A trained member with the text it is measured on."""

    name: str
    recipe: Recipe
    loaded: Loaded
    held_out: Encoded


def read_recipe(file: Path, terms: Terms) -> Recipe:
    """The recipe with the group's text, seed and limit in place of its own: all are scored on the same text."""
    limit = [f"training.{name}={value}" for name, value in terms.budget.limit.items()]
    chosen = run.resolve(file, [*terms.overrides, *limit], data=terms.data, seed=terms.seed)
    chosen = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, valid=None, test=None))
    if limit:
        others: dict[str, Any] = {"steps": None, "tokens": None, "seconds": None} | terms.budget.limit
        chosen = dataclasses.replace(chosen, training=dataclasses.replace(chosen.training, **others))
    return chosen


def count_parameters(recipe: Recipe) -> int:
    """How many the model will have on the recipe's text."""
    fitted = recipe.with_vocabulary(run.open_text(recipe, "train").tokenizer.size)
    return outline(fitted.family, fitted.model).parameter_count


def train(recipe: Recipe, out: Path, device: torch.device) -> tuple[run.Outcome, int | None]:
    """To the recipe's end, from where the run in `out` stands; and the peak of memory, None where nothing was to do."""
    if device.type == "cuda" or recipe.training.compile:
        # Graphs are counted by the code they come from, and after a few of other members none would be compiled.
        torch.compiler.reset()
    trouble = ""
    with peak_memory(device) as peak:
        try:
            outcome = run.train(recipe, out, resume="auto", device=device)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            trouble = f"out of memory on {device} in training; lower training.batch, or raise training.accumulate"
    if trouble:
        # Told only here: the error held everything it was short of.
        give_back(device)
        raise TrainingError(trouble)
    return outcome, peak.bytes if outcome.took_steps else None


def out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error)


def training_speed(out: Path) -> float | None:
    """Tokens per second, the median over the steps: validation and saving fall between them."""
    lines = read_lines(out / "metrics.jsonl")
    speeds = [line["tokens_per_second"] for line in lines if isinstance(line.get("tokens_per_second"), float)]
    return float(np.median(speeds)) if speeds else None


def open_member(name: str, recipe: Recipe, out: Path, terms: Terms) -> Opened:
    """The trained model as its recipe would have it scored."""
    chosen = recipe.evaluation
    known = {field.name for field in dataclasses.fields(recipe.model)}
    settings = {key: value for key, value in chosen.settings.items() if key in known}
    loaded = load_model(out, overrides=settings, device=terms.device, dtype=terms.dtype)
    if loaded.model.has_memory and chosen.segment is not None:
        loaded.model.config = dataclasses.replace(loaded.model.config, segment=chosen.segment)
    return Opened(name, recipe, loaded, open_corpus(recipe.data.corpus, SPLIT, loaded.tokenizer))


def score(one: Opened, tokens: int) -> dict[str, Any]:
    """Bits of the held-out text: a stream with memory, or a window before every token where there is none."""
    model, text = one.loaded.model, one.held_out
    ids = text.ids[: tokens or None]
    window = one.recipe.evaluation.segment or model.config.segment
    read = sliding_losses if slides(model) else stream_losses
    tally = Tally()
    try:
        for stretch in read(model, ids, segment=window, starts=text.starts[1:]):
            tally.add(stretch)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise LongspanError(f"out of memory in scoring, {window} tokens at once; lower evaluation.segment") from None
    if not math.isfinite(tally.nats):
        raise DataError("its held-out loss is not finite; lower training.lr")
    return {
        "bits": tally.bits,
        "unit": one.loaded.tokenizer.unit,
        "scored": tally.count,
        "read": "window" if slides(model) else "stream",
        "segment": window,
        "memory": getattr(model.config, "memory", 0),
        "copy": getattr(model.config, "copy", 0),
        "learned": model.facts(),
    }
