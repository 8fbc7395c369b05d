"""The points of a scaling law: parameters, tokens and final loss of finished runs."""

import csv
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan import config
from longspan.checkpoints.manifest import MANIFEST
from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError, counted, not_read
from longspan.experiments.report.runs import Run, read_run
from longspan.models.families import outline
from longspan.training.recipe import Recipe, load_recipe
from longspan.training.utilisation import flops_per_token

GROUP = "training.memory"
LARGEST = 10**18  # parameters or tokens
NO_DECAY = "the learning rate does not fall (a trunk), so the loss is not that of a finished run"


@dataclass(frozen=True)
class Point:
    """A finished run."""

    name: str
    group: str
    parameters: int
    """All of them; tied weights count once."""
    non_embedding: int
    """Without the tables of embedding and softmax, as Kaplan et al. 2020 count."""
    tokens: int
    """Tokens of training, repeated ones included."""
    bits: float
    """Per token of the validation split, at the end of training."""
    flops: float
    """Of training: matrix products and attention, memory included."""


COLUMNS = tuple(field.name for field in dataclasses.fields(Point))


def read_points(paths: Sequence[Path], by: str = GROUP) -> tuple[list[Point], list[str]]:
    """The points of run folders, of folders that contain run folders, and of .csv files; and notes about runs that are
    left out. Runs with different values of the recipe's key `by` form different groups."""
    points: list[Point] = []
    notes: list[str] = []
    trunks = 0
    for path in paths:
        if path.suffix == ".csv":
            points += _read_csv(path)
            continue
        found = list(runs_in(path))
        if not found:
            raise DataError(f"{path} has no training run; use folders of runs, or a .csv with {', '.join(COLUMNS)}")
        for folder in found:
            name = point_name(path, folder)
            run = read_run(folder)
            recipe = load_recipe(folder / "recipe.toml")
            reason = why_unfinished(run, recipe)
            if reason is None:
                points.append(_point(name, run, recipe, by))
            elif reason == NO_DECAY:
                trunks += 1
            else:
                notes.append(f"{name} is left out: {reason}")
    if trunks:
        notes.append(f"{counted(trunks, 'run')} left out: {NO_DECAY}")
    _check(points)
    different = list(dict.fromkeys(points))
    if twice := len(points) - len(different):
        notes.append(f"{counted(twice, 'run')} given twice: counted once")
    return different, notes


def point_name(path: Path, folder: Path) -> str:
    """The name of the run in `folder`, which was found in `path`."""
    return folder.name if folder == path else str(folder.relative_to(path))


def runs_in(folder: Path) -> Iterator[Path]:
    """The folders of runs in a folder, sorted; the folder itself if it is a run. Checkpoints are not runs."""
    if (folder / "recipe.toml").is_file():
        if not (folder / MANIFEST).exists():  # a checkpoint has a recipe too
            yield folder
        return
    if folder.is_dir():
        for below in sorted(path for path in folder.iterdir() if path.is_dir()):
            yield from runs_in(below)


def why_unfinished(run: Run, recipe: Recipe) -> str | None:
    """Why the last validation of a run is not its final loss; None if it is."""
    training = recipe.training
    if training.schedule == "constant" and not training.cooldown:
        return NO_DECAY
    steps, validated = run.training["step"], run.held_out["step"]
    if not steps.size:
        return "it has no steps"
    if training.steps is not None and steps[-1] < training.steps and training.seconds is None:
        return f"it has {int(steps[-1]):,} of {training.steps:,} steps"
    if not validated.size or validated[-1] != steps[-1]:
        return "it has no validation after its last step; set training.validate_every"
    return None


def count_non_embedding(model: LanguageModel) -> int:
    """Parameters outside of the tables of tokens and the projections of an adaptive softmax."""
    return sum(p.numel() for name, p in model.named_parameters() if name.partition(".")[0] not in ("embedding", "head"))


def _point(name: str, run: Run, recipe: Recipe, by: str) -> Point:
    model = outline(recipe.family, recipe.model)
    tokens = int(run.training["tokens"][-1])
    per_token = flops_per_token(model.parameter_count, recipe.model, recipe.training_reading())
    return Point(
        name,
        f"{by}={_value(recipe, by)}",
        model.parameter_count,
        count_non_embedding(model),
        tokens,
        float(run.held_out["bits"][-1]),
        per_token * tokens,
    )


def _value(recipe: Recipe, by: str) -> str:
    """The value of a recipe's key, such as training.memory."""
    table, _, key = by.partition(".")
    if by == "model.family":
        return recipe.family
    found: Any = getattr(recipe, table, None) if table in ("model", "data", "training", "evaluation") else None
    values = {} if found is None else {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    if key not in values:
        raise ConfigError(f"--by {by} is not a key of a recipe; use for example {GROUP} or model.family")
    value = values[key]
    if by == GROUP:
        value = recipe.training_reading().memory
    return "unset" if value is None else str(config.show(value))


def _read_csv(path: Path) -> list[Point]:
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
        points = [
            Point(
                row["name"],
                row["group"],
                int(row["parameters"]),
                int(row["non_embedding"]),
                int(row["tokens"]),
                float(row["bits"]),
                float(row["flops"]),
            )
            for row in rows
        ]
    except OSError as error:
        raise not_read(path, error) from None
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a table of points ({error}); it needs {', '.join(COLUMNS)}") from None
    if not points:
        raise DataError(f"{path} has no points; it needs rows with {', '.join(COLUMNS)}")
    return points


def _check(points: Sequence[Point]) -> None:
    for point in points:
        for name in ("parameters", "non_embedding", "tokens"):
            if not 1 <= (value := getattr(point, name)) <= LARGEST:
                raise DataError(
                    f"{point.name}: {name}={config.shown(value)} must be between 1 and 1e18; remove this run"
                )
        for name in ("bits", "flops"):
            if not (math.isfinite(value := getattr(point, name)) and value > 0):
                raise DataError(f"{point.name}: {name}={value} must be a number above 0; remove this run")


def write_csv(points: Sequence[Point], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(dataclasses.astuple(point) for point in points)
