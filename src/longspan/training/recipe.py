"""A recipe: everything that determines what a run computes, as TOML and as frozen dataclasses."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan import config
from longspan.errors import ConfigError, UnknownNameError
from longspan.models.families import family
from longspan.nn.model_config import require
from longspan.reading import LONGEST, Reading
from longspan.training.recipe_lines import line_of
from longspan.training.recipe_tables import (
    LARGEST,
    SECTIONS,
    SETTINGS,
    DataConfig,
    EvaluationConfig,
    ExpectedConfig,
    ResultConfig,
    Steps,
    TrainingConfig,
    as_steps,
    settings_in,
    value_at,
)

__all__ = [
    "LARGEST",
    "MOVED",
    "SECTIONS",
    "SETTINGS",
    "DataConfig",
    "EvaluationConfig",
    "ExpectedConfig",
    "Recipe",
    "RenamedKeysError",
    "ResultConfig",
    "Steps",
    "TrainingConfig",
    "as_steps",
    "build_recipe",
    "find_recipe",
    "load_recipe",
    "recipe_folders",
    "recipe_names",
    "value_at",
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a run except its text; `model` is the config of `family`."""

    name: str
    family: str
    model: Any
    training: TrainingConfig
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    expected: ExpectedConfig = field(default_factory=ExpectedConfig)
    result: ResultConfig = field(default_factory=ResultConfig)

    def __post_init__(self) -> None:
        self._check_settings()
        self.training_readings()  # raises an error if settings contradict each other
        self.evaluation_reading()

    def _check_settings(self) -> None:
        """A setting that the family does not use is an error, because it would have no effect."""
        used = family(self.family).settings
        for table, values in (
            ("training", settings_in(self.training, SETTINGS)),
            ("evaluation", self.evaluation.settings),
        ):
            for key in values:
                require(key in used, f"{table}.{key} has no effect on the family {self.family}; leave it out")

    def _changes(self) -> list[int]:
        """The steps at which segment or memory changes."""
        return sorted({step for key in ("segment", "memory") for step, _ in as_steps(getattr(self.training, key) or 0)})

    def training_reading(self, step: int = 0) -> Reading:
        """The reading of a step."""
        values = settings_in(self.training, ("segment", *SETTINGS))
        for key in ("segment", "memory"):
            if key in values:
                values[key] = value_at(values[key], step)
        return dataclasses.replace(family(self.family).reading, **values)

    def training_readings(self) -> list[Reading]:
        """Every reading of the schedules, in order."""
        return [reading for _, reading in self.reading_schedule()]

    def reading_schedule(self) -> list[tuple[int, Reading]]:
        """The first step of every reading, and the reading."""
        return [(step, self.training_reading(step)) for step in self._changes()]

    @property
    def longest_distance(self) -> int:
        """The longest distance between a query and a key at the end of training."""
        reading = self.training_readings()[-1]
        return (reading.window or reading.segment + self.training.overlap + reading.memory) - 1

    def evaluation_reading(self) -> Reading:
        """The reading at the end of training, with the settings of [evaluation]. If neither sets a clamp, distances
        beyond those of training are clamped, and their scores are lowered by the model's `far_discount`. Segments are
        as long as in training, with the overlap."""
        reading, values, longest = self.training_readings()[-1], self.evaluation.settings, self.longest_distance
        discount = getattr(self.model, "far_discount", None)  # a task has none: it is read as in training
        unset = discount is not None and not reading.clamp and self.training.clamp is None and "clamp" not in values
        if unset and longest and "clamp" in family(self.family).settings:
            values = {"clamp": min(longest, LONGEST), "discount": discount} | values
        if self.training.overlap:
            values = {"segment": reading.segment + self.training.overlap} | values
        return dataclasses.replace(reading, **values)

    def with_vocabulary(self, size: int) -> "Recipe":
        """The recipe with the vocabulary of its text, which overrides that of the file."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocabulary=size))

    def to_toml(self) -> str:
        tables = {name: config.plain(getattr(self, name)) for name in SECTIONS}
        return config.to_toml(
            {"name": self.name, "model": {"family": self.family, **config.plain(self.model)}} | tables
        )


MOVED = {
    **{f"model.{key}": f"training.{key}" for key in ("segment", "memory", "clamp", "same_length")},
    "model.copy": "training.pointer",
    "model.copy_width": "model.pointer_width",
    "data.tokens": "data.tokenizer",
    "training.record": "training.cuda_graph",
    "evaluation.copy": "evaluation.pointer",
    "evaluation.lanes": "evaluation.streams",
    "reached": "result",
}
"""Keys and tables of longspan 0.1 and their new names."""


RUN_FILES = ("run.json", "manifest.json")
"""One of them is next to the recipe of a run or of a checkpoint."""


class RenamedKeysError(ConfigError):
    """A recipe with keys of longspan 0.1."""

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self.changes = ", ".join(f"{old} to {new}" for old, new in renamed.items())
        super().__init__(f"keys of longspan 0.1 were renamed: {self.changes}; use the new names")


def recipe_folders() -> list[Path]:
    """The folders of recipes that have a name: in the installed package, or in the source tree."""
    package = Path(__file__).parents[1]
    return [folder for folder in (package / "recipes", package.parents[1] / "recipes") if folder.is_dir()]


def recipe_names() -> list[str]:
    return sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.toml")})


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe: a path, the name of a recipe of longspan, or a file in the working directory."""
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text:
        if not Path(text).is_file():
            raise ConfigError(f"there is no recipe file {text}; known names: {', '.join(recipe_names())}")
        return Path(text)
    for folder in recipe_folders():
        if (folder / f"{text}.toml").is_file():
            return folder / f"{text}.toml"
    if Path(text).is_file():
        return Path(text)
    raise UnknownNameError("recipe", text, recipe_names())


def load_recipe(
    name_or_path: str | Path, overrides: Sequence[str] = (), model: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe with that name or path, with `key=value` overrides applied.

    `model` is the table of a model that is trained further; it replaces that of the recipe and its tokenizer.
    """
    path = find_recipe(name_or_path)
    values = dict(config.read_toml(path))
    if model is not None:
        values["model"] = dict(model)
        if isinstance(data := values.get("data"), Mapping):
            values["data"] = {key: value for key, value in data.items() if key not in ("tokenizer", "minimum")}
    over = config.parse_overrides(overrides)
    try:
        return build_recipe(config.merge(values, over), path.stem)
    except ConfigError as error:
        raise _located(error, path, over) from None


def _located(error: ConfigError, path: Path, over: Mapping[str, Any]) -> ConfigError:
    """The error of a recipe's file, with the line of its key. An error of an override is returned as it is."""
    line = line_of(str(error), path, over)
    if line is None:
        return error
    if isinstance(error, RenamedKeysError) and any((path.parent / name).is_file() for name in RUN_FILES):
        return ConfigError(
            f"{path.parent} was trained by longspan 0.1 and cannot be resumed, but its model can be loaded; "
            f"to train its recipe again, rename the keys {error.changes}"
        )
    model = over.get("model")
    if isinstance(model, Mapping) and "family" in model:
        return ConfigError(
            f"{path.name}, line {line}, does not fit model.family={model['family']}: {error}; use a recipe for "
            "this family"
        )
    return ConfigError(f"{path.name}, line {line}: {error}")


def build_recipe(values: Mapping[str, Any], name: str = "recipe") -> Recipe:
    """A recipe from plain values. Unknown keys and wrong types are errors."""
    tables = dict(values)
    name = tables.pop("name", name)
    found = [f"{key}.{below}" for key, table in tables.items() if isinstance(table, Mapping) for below in table]
    if renamed := {key: MOVED[key] for key in (*tables, *found) if key in MOVED}:
        raise RenamedKeysError(renamed)
    for key, table in tables.items():
        if key not in ("model", *SECTIONS):
            raise UnknownNameError("table", key, ["model", *SECTIONS])
        if not isinstance(table, Mapping):
            raise ConfigError(f"{key}={config.shown(table)} must be a table, not a plain value")
    if not isinstance(name, str):
        raise ConfigError(f"name={config.shown(name)} must be a string")
    config.require_unicode(name, "name")
    model = dict(tables.get("model", {}))
    chosen = model.pop("family", "transformer-xl")
    if not isinstance(chosen, str):
        raise ConfigError(f"model.family={config.shown(chosen)} must be a string")
    cls = family(chosen).Config
    sections: dict[str, Any] = {key: config.build(c, tables.get(key, {}), key) for key, c in SECTIONS.items()}
    return Recipe(
        name=name, family=chosen, model=config.build(cls, _with_assumed_vocabulary(model), "model"), **sections
    )


def _with_assumed_vocabulary(model: dict[str, Any]) -> dict[str, Any]:
    """The table of a model with a vocabulary that its cutoffs fit into, if it names none: the text decides later."""
    cutoffs = model.get("cutoffs")
    if "vocabulary" in model or not isinstance(cutoffs, list) or not all(type(cutoff) is int for cutoff in cutoffs):
        return model
    return model | {"vocabulary": min(max([255, *cutoffs]) + 1, 2**24)}  # larger ones are refused as cutoffs
