"""What the folder of a training run tells: its recipe, its curves and what it ran on."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError


@dataclass(frozen=True, eq=False)
class Run:
    """`training` and `held_out` hold columns by name, one entry per line of their files."""

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

    @property
    def evaluation(self) -> dict[str, Any]:
        """How the recipe wants the model scored, less what it leaves open."""
        return {key: value for key, value in self.recipe.get("evaluation", {}).items() if value is not None}


def read_run(path: Path, name: str | None = None) -> Run:
    """The run in a folder; lines that a crash cut short are left out."""
    try:
        recipe = tomllib.loads((path / "recipe.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} is not the folder of a training run: no recipe.toml ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _columns(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[np.float64]]:
    """The named numbers of every whole line of a file of JSON lines."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
                rows.append([float(values[name]) for name in names])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
    table = np.array(rows, np.float64).reshape(-1, len(names))
    return {name: table[:, k] for k, name in enumerate(names)}
