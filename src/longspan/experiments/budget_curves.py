"""Loss against training time and against training tokens: runs of several budgets, with and without memory.

A model without memory trains faster, so it reads more text in the same time; a model with memory predicts more from the
text it has read. Two curves over the same budgets show from where on one of them is ahead.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longspan.checkpoints.model_folder import Loaded, load_model
from longspan.checkpoints.store import write_file
from longspan.data.cache import key
from longspan.data.encoded import Excerpt
from longspan.errors import DataError
from longspan.experiments.contexts import unique_names
from longspan.experiments.report.runs import Run, read_run
from longspan.experiments.scaling.points import runs_in, why_unfinished
from longspan.reading import Reading
from longspan.scoring.score import Method, score
from longspan.training.recipe import Recipe, load_recipe

UNITS = {"seconds": 60.0, "tokens": 1e6}
"""What losses are drawn against, and the unit of that axis: minutes and millions."""


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
    """The finished runs in each folder, by number of steps; a folder is a curve, as `train --budgets` writes it. The
    curve has the name of the folder, or its path if another folder has the same name."""
    found = []
    for name, folder in zip(unique_names(folders), folders, strict=True):
        runs = [(read_run(path), load_recipe(path / "recipe.toml"), path) for path in runs_in(folder)]
        finished = [one for one in runs if why_unfinished(one[0], one[1]) is None]
        if not finished:
            raise DataError(f"{folder} has no finished run; train one with longspan train --budgets")
        speed = float(np.median(np.concatenate([run.training["tokens_per_second"] for run, _, _ in runs])))
        found += sorted((_budget_run(name, *one, speed) for one in finished), key=lambda run: run.steps)
    return found


def _budget_run(curve: str, run: Run, recipe: Recipe, path: Path, speed: float) -> BudgetRun:
    tokens = int(run.training["tokens"][-1])
    return BudgetRun(curve, path, recipe, int(run.training["step"][-1]), tokens, tokens / speed)


@dataclass(frozen=True)
class Way:
    """One way to score a run. `name` is "memory" (a stream), "segments" (each segment alone, as in a training without
    memory) or "window" (a full window before every token, recomputed for every `stride` tokens)."""

    name: str
    reading: Reading
    stride: int = 1

    @property
    def facts(self) -> dict[str, Any]:
        kept = ("segment", "memory", "clamp", "discount")
        return {"way": self.name} | {key: getattr(self.reading, key) for key in kept} | {"stride": self.stride}


def trained_with_memory(recipe: Recipe) -> bool:
    return recipe.training_reading().memory > 0


def memory_way(recipe: Recipe, memory: int, discount: float = 0.0) -> Way:
    """A stream with this memory at temperature 1. Distances beyond those of training are clamped and discounted.
    With memory 0, segments of training are read one at a time."""
    trained = recipe.training_reading()
    if memory == 0:
        return Way("segments", replace(trained, memory=0, same_length=False, clamp=0, pointer=0))
    longest = recipe.longest_distance
    settings: dict[str, Any] = {"memory": memory, "clamp": longest, "same_length": True, "temperature": 1.0}
    settings["discount"] = discount if memory - 1 > longest else 0.0
    return Way("memory", replace(recipe.evaluation_reading(), **settings))


def window_way(recipe: Recipe, stride: int = 1) -> Way:
    """A window of a training segment before every token, without memory."""
    return Way("window", memory_way(recipe, 0).reading, stride)


def ways_of(
    recipe: Recipe, memories: Sequence[int], further: Sequence[int], discount: float, stride: int, *, largest: bool
) -> list[Way]:
    """How a run is scored. A run that was trained with memory: with each of the memories. A run that was trained
    without: in segments as in training and with windows. The largest run of a curve: also with the `further` memories,
    and with all of them without the discount."""
    lengths = [*memories, *further] if largest else list(memories)
    if not trained_with_memory(recipe):
        lengths = lengths if largest else [0]
    ways = [memory_way(recipe, memory, discount) for memory in lengths]
    if largest:
        ways += [memory_way(recipe, memory) for memory in lengths]
    if not trained_with_memory(recipe):
        ways += [memory_way(recipe, 0), window_way(recipe, stride)]
    return list(dict.fromkeys(ways))


class ScoreFile:
    """Scores in a JSON file that is written after each of them, so that a second call computes only missing ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scores: dict[str, dict[str, Any]] = json.loads(path.read_bytes()) if path.is_file() else {}

    def get(self, loaded: Loaded, text: Excerpt, fingerprint: str, way: Way, streams: int) -> dict[str, Any]:
        """The score of the first tokens of a text that has this fingerprint."""
        streams = streams if way.name != "window" else 1
        dtype = str(next(loaded.model.parameters()).dtype)
        name = key(loaded.hash, dtype, fingerprint, len(text.ids), asdict(way), streams)
        if name not in self.scores:
            method: Method = "sliding" if way.name == "window" else "stream"
            found = score(loaded.model, text, way.reading, method=method, streams=streams, stride=way.stride)
            facts = {"bits": found.bits, "scored": found.scored, "streams": streams, "dtype": dtype}
            facts |= {"tokens_per_second": found.tokens_per_second, "seconds": found.seconds}
            self.scores[name] = way.facts | facts
            write_file(self.path, (json.dumps(self.scores, indent=1) + "\n").encode())
        return self.scores[name]


def window_label(one: Mapping[str, Any]) -> str:
    return "a window per token" if one["stride"] == 1 else f"a window per {one['stride']} tokens"


def _label(curve: str, one: Mapping[str, Any]) -> str:
    return f"{curve}, {window_label(one) if one['way'] == 'window' else 'segments as trained'}"


def _way(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(one[name] for name in ("way", "memory", "discount", "stride"))


def lines_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The lines of the figure, by label: points with seconds, tokens and bits. A curve that was trained with memory has
    the best of the memories that all of its runs were scored with. One that was trained without has two lines: segments
    and windows."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        others = [{_way(one) for one in other["scores"]} for other in rows if other["curve"] == row["curve"]]
        shared = [one for one in row["scores"] if _way(one) in set.intersection(*others)]
        if row["trained_memory"]:
            shown = {row["curve"]: shared}
        else:
            labels = [(one, _label(row["curve"], one)) for one in shared if one["way"] != "memory"]
            shown = {label: [one] for one, label in labels}
        for label, scores in shown.items():
            if scores:
                best = min(scores, key=lambda one: float(one["bits"]))
                point = {"seconds": row["seconds"], "tokens": row["tokens"], "steps": row["steps"]}
                lines.setdefault(label, []).append(point | {"bits": best["bits"], "memory": best["memory"]})
    return lines


def compare_lines(lines: Mapping[str, Sequence[Mapping[str, Any]]], curves: Mapping[str, str]) -> list[dict[str, Any]]:
    """Where lines of different curves cross, against seconds and against tokens, and how far apart they are at the end
    of the range that they share. `curves` has the curve of each label."""
    found = []
    for (first, one), (second, other) in itertools.combinations(lines.items(), 2):
        if curves[first] == curves[second]:
            continue
        for unit in UNITS:
            pair = [[(float(point[unit]), float(point["bits"])) for point in points] for points in (one, other)]
            shared = min(max(x for x, _ in points) for points in pair)
            row: dict[str, Any] = {"first": first, "second": second, "against": unit}
            row["crossings"] = [{unit: x, "bits": at(pair[0], x)} for x in crossings(*pair)]
            if shared >= max(min(x for x, _ in points) for points in pair):
                row |= {"shared": shared, "first_minus_second": at(pair[0], shared) - at(pair[1], shared)}
            found.append(row)
    return found


def open_budget_run(run: BudgetRun, device: str, dtype: str) -> Loaded:
    """The trained model of a run, for scoring."""
    from longspan.device import find_device, find_dtype

    where = find_device(device)
    return load_model(run.folder, device=where, dtype=find_dtype(dtype, where))


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


def at(curve: Sequence[tuple[float, float]], x: float) -> float:
    """The loss of a curve at x."""
    return float(_at(curve, np.log([x]))[0])


def _at(curve: Sequence[tuple[float, float]], logs: "np.ndarray") -> "np.ndarray":
    xs, losses = zip(*sorted(curve), strict=True)
    return np.asarray(np.interp(logs, np.log(xs), losses))
