"""The folder of a training run: its recipe, its curves and the machine it ran on."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan import config
from longspan.errors import ConfigError, DataError
from longspan.reading import Reading

KEYS: dict[str, dict[str, Any]] = {
    "model": {"family": str | None},
    "data": {"corpus": str | None},
    "evaluation": dict.fromkeys(("segment", "memory", "clamp", "pointer", "copy"), int | None)
    | {"same_length": bool | None, "temperature": float | None, "discount": float | None},
}
"""The keys of a recipe that a report uses, with their types."""


@dataclass(frozen=True, eq=False)
class Run:
    """`training` and `held_out` hold the columns of their files by name, one value per line."""

    name: str
    path: Path
    recipe: dict[str, Any]
    training: dict[str, NDArray[np.float64]]
    held_out: dict[str, NDArray[np.float64]]
    machine: dict[str, Any]

    @property
    def family(self) -> str:
        return str(self.recipe.get("model", {}).get("family", "unknown"))

    @property
    def corpus(self) -> str:
        return str(self.recipe.get("data", {}).get("corpus", ""))

    @property
    def held_out_files(self) -> dict[str, str]:
        """The files or folders that the recipe gives for a split."""
        data = self.recipe.get("data", {})
        return {name: str(data[name]) for name in ("valid", "test") if name in data}

    def data_option(self, name: str) -> str | None:
        """A key of the recipe's data table."""
        value = self.recipe.get("data", {}).get(name)
        return None if value is None else str(value)

    @property
    def evaluation(self) -> dict[str, Any]:
        """The reading settings that the recipe gives for evaluation."""
        return _evaluation(self.recipe)


def read_run(path: Path, name: str | None = None) -> Run:
    """The run in a folder. Lines that a crash cut short are skipped."""
    if not (path / "recipe.toml").is_file():
        raise DataError(
            f"{path} is not the folder of a training run, because it has no recipe.toml; use a folder that "
            "longspan train wrote"
        )
    try:
        recipe = config.read_toml(path / "recipe.toml")
        for table, keys in KEYS.items():
            _check_table(recipe.get(table, {}), table, keys)
        Reading(**_evaluation(recipe))
    except ConfigError as error:
        raise DataError(f"{path / 'recipe.toml'} cannot be read: {error}") from None
    processes = _json(path / "run.json").get("processes")
    return Run(
        name or path.resolve().name,
        path,
        recipe,
        _columns(path / "metrics.jsonl", ("step", "tokens", "bits", "tokens_per_second", "seconds")),
        _columns(path / "validation.jsonl", ("step", "bits")),
        processes[-1] if isinstance(processes, list) and processes and isinstance(processes[-1], dict) else {},
    )


def _check_table(table: Any, name: str, keys: Mapping[str, Any]) -> None:
    """Raise a ConfigError if one of these keys has the wrong type."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name}={config.shown(table)} must be a table of keys, not a plain value")
    for key, kind in keys.items():
        config.convert(kind, table.get(key), f"{name}.{key}")


def _evaluation(recipe: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key in KEYS["evaluation"] if (value := recipe.get("evaluation", {}).get(key)) is not None}
    if "copy" in values:  # the pointer of longspan 0.1
        values.setdefault("pointer", values.pop("copy"))
    return values


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _columns(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[np.float64]]:
    """The named numbers of every complete line of a file of JSON lines."""
    rows = []
    if path.is_file():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            try:
                values = json.loads(line)
                row = [float(values[name]) for name in names]
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
            infinite = [name for name, value in zip(names, row, strict=True) if not math.isfinite(value)]
            if set(infinite) & {"step", "tokens", "seconds"}:
                raise DataError(f"line {number} of {path} has an infinite {infinite[0]}; remove that line")
            if not infinite:  # a loss may be infinite, but a curve cannot show it
                rows.append(row)
    table = np.array(rows, np.float64).reshape(-1, len(names))
    return {name: table[:, k] for k, name in enumerate(names)}
