"""compare.json: the results of a comparison, so that a second call measures only new parts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.checkpoints.store import write_file
from longspan.errors import ConfigError
from longspan.training.recipe import find_recipe

FILE, FORMAT = "compare.json", 1


@dataclass
class ResultsFile:
    """`members` holds an entry per name: the recipe's file, and the score with a key of everything it depends on."""

    folder: Path
    limit: dict[str, int]
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    contexts: dict[str, dict[str, Any]] = field(default_factory=dict)
    report: str = ""

    def save(self) -> None:
        values = {"format": FORMAT, "limit": self.limit, "members": self.members}
        values |= {"contexts": self.contexts, "report": self.report}
        write_file(self.folder / FILE, (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())


def open_results(folder: Path, limit: dict[str, int]) -> ResultsFile:
    """The results in a folder, which must have the same limit; new ones if the folder is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; use a folder")
    path = folder / FILE
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty and has no {FILE}; choose another folder")
        return ResultsFile(folder, limit)
    try:
        values = json.loads(path.read_bytes())
        known = {"limit": dict, "members": dict, "contexts": dict, "report": str}
        valid = values["format"] == FORMAT and all(isinstance(values[key], kind) for key, kind in known.items())
        valid = valid and all(isinstance(entry, dict) for entry in values["members"].values())
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise ConfigError(f"{path} is damaged or was written by another version; delete this file (the runs are kept)")
    if values["limit"] != limit:
        # Extending a run past the end of its schedule does not give the run of a longer budget.
        raise ConfigError(
            f"{folder} has a comparison with {_shown(values['limit'])}, not {_shown(limit)}; use another "
            "folder or the same budget"
        )
    return ResultsFile(folder, limit, values["members"], values["contexts"], values["report"])


def _shown(limit: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in limit.items()) or "the recipes' own limits"


def name_members(recipes: Sequence[str], results: ResultsFile) -> dict[str, Path]:
    """A unique name for each recipe: its file name, preceded by its folder if two files share a name.

    The name is also that of the run's folder. A file that has a name in `results` keeps it.
    """
    files = [find_recipe(recipe).resolve() for recipe in recipes]
    for k, file in enumerate(files):
        if file in files[:k]:
            raise ConfigError(f"RECIPE {recipes[k]} is given twice ({file}); list each recipe only once")
    kept = {Path(str(entry.get("recipe"))): str(entry.get("base", name)) for name, entry in results.members.items()}
    # The name of a deleted file is free: the run in that folder is resumed only by the same recipe.
    taken = {name for file, name in kept.items() if file.is_file()}
    stems = [file.stem for file in files if file not in kept]
    named: dict[str, Path] = {}
    for file in files:
        name = kept.get(file)
        if name is None:
            alone = stems.count(file.stem) == 1 and file.stem not in taken
            name = _unused(file.stem if alone else f"{file.parent.name or 'root'}-{file.stem}", taken)
        taken.add(name)
        named[name] = file
    return named


def _unused(name: str, taken: set[str]) -> str:
    count, found = 1, name
    while found in taken:
        count += 1
        found = f"{name}-{count}"
    return found
