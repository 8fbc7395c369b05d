"""Loss against training time and against training tokens: runs of several budgets, with and without memory.

A model without memory trains faster, so it reads more text in the same time; a model with memory predicts more from the
text it has read. Two curves over the same budgets show from where on one of them is ahead.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from longspan.checkpoints.model_folder import load_model
from longspan.contract import LanguageModel
from longspan.data.encoded import Excerpt
from longspan.errors import DataError
from longspan.experiments.figures.drawing import legend_name, line_style, save_figure
from longspan.experiments.report.runs import Run, read_run
from longspan.experiments.scaling.points import runs_in, why_unfinished
from longspan.reading import Reading
from longspan.scoring.score import score
from longspan.training.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class BudgetRun:
    """A finished run of one budget. `curve` is its label: runs of one label are joined by a line."""

    curve: str
    folder: Path
    recipe: Recipe
    steps: int
    tokens: int
    seconds: float
    """Training at its median speed: without compilation, validation and saving, which short runs would be dominated
    by."""


def read_budget_runs(folders: Sequence[Path]) -> list[BudgetRun]:
    """The finished runs in each folder, by number of steps; a folder is a curve, as `train --budgets` writes it."""
    found = []
    for folder in folders:
        runs = [(read_run(path), load_recipe(path / "recipe.toml"), path) for path in runs_in(folder)]
        finished = [one for one in runs if why_unfinished(one[0], one[1]) is None]
        if not finished:
            raise DataError(f"{folder} has no finished run; train it with longspan train --budgets")
        speed = float(np.median(np.concatenate([run.training["tokens_per_second"] for run, _, _ in runs])))
        found += sorted((_budget_run(folder.name, *one, speed) for one in finished), key=lambda run: run.steps)
    return found


def _budget_run(curve: str, run: Run, recipe: Recipe, path: Path, speed: float) -> BudgetRun:
    tokens = int(run.training["tokens"][-1])
    return BudgetRun(curve, path, recipe, int(run.training["step"][-1]), tokens, tokens / speed)


def readings(recipe: Recipe, memories: Sequence[int], discount: float = 0.0) -> dict[int, Reading]:
    """How a model is read with each memory: distances beyond those of training are clamped and discounted. Without
    memory, segments of training are read one at a time."""
    trained = recipe.training_reading()
    longest = trained.memory + trained.segment - 1
    base = replace(recipe.evaluation_reading(), clamp=longest, same_length=True)
    found = {}
    for memory in memories:
        if memory == 0:
            found[0] = replace(trained, memory=0, same_length=False, clamp=0)
        else:
            found[memory] = replace(base, memory=memory, discount=discount if memory > longest else 0.0)
    return found


def score_memories(
    model: LanguageModel, text: Excerpt, ways: Mapping[int, Reading], streams: int = 1
) -> dict[int, float]:
    """Bits per token of a text for each memory length."""
    return {
        memory: score(model, text, reading, method="stream", streams=streams).bits for memory, reading in ways.items()
    }


def score_window(model: LanguageModel, text: Excerpt, recipe: Recipe) -> float:
    """Bits per token when every token is predicted from a full window of training, recomputed for each token."""
    reading = replace(recipe.training_reading(), memory=0, same_length=False, clamp=0)
    return score(model, text, reading, method="sliding").bits


def open_budget_run(run: BudgetRun, device: str, dtype: str) -> LanguageModel:
    """The trained model of a run, for scoring."""
    from longspan.device import find_device, find_dtype

    where = find_device(device)
    return load_model(run.folder, device=where, dtype=find_dtype(dtype, where)).model


def crossings(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> list[float]:
    """The x at which two curves of (x, loss) cross, in the range they share. Between two points, the loss is linear in
    log x."""
    low = max(min(x for x, _ in curve) for curve in (first, second))
    high = min(max(x for x, _ in curve) for curve in (first, second))
    places = sorted({x for x, _ in (*first, *second) if low <= x <= high})
    logs = np.log(places)
    apart = _at(first, logs) - _at(second, logs)
    found = []
    for (a, left), (b, right) in itertools.pairwise(zip(logs, apart, strict=True)):
        if left == 0:
            found.append(math.exp(a))
        elif left * right < 0:
            found.append(math.exp(a + (b - a) * left / (left - right)))
    return found


def _at(curve: Sequence[tuple[float, float]], logs: "np.ndarray") -> "np.ndarray":
    xs, losses = zip(*sorted(curve), strict=True)
    return np.asarray(np.interp(logs, np.log(xs), losses))


def draw_budgets(curves: Mapping[str, Sequence[tuple[float, float, float]]], folder: Path, title: str) -> None:
    """budgets.png, .svg and .pdf: losses of every curve (seconds, tokens, bits) against time and against tokens."""
    with save_figure(folder, "budgets", 8.0, 3.6) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for k, (name, points) in enumerate(curves.items()):
            seconds, tokens, bits = zip(*points, strict=True)
            left.plot([value / 60 for value in seconds], bits, **line_style(k), label=legend_name(name))
            right.plot([value / 1e6 for value in tokens], bits, **line_style(k))
        left.set_xlabel("training time (minutes)")
        right.set_xlabel("training tokens (millions)")
        left.set_ylabel("loss (bits per byte)")
        left.set_title(title)
        left.legend(fontsize=8)
        first = next(iter(curves.values()))
        for axes, values in ((left, [s / 60 for s, _, _ in first]), (right, [t / 1e6 for _, t, _ in first])):
            axes.set_xscale("log")
            axes.set_xticks(values, [f"{value:.3g}" for value in values])
            axes.set_xticks([], minor=True)
            axes.grid(color="#dddddd", linewidth=0.6)
