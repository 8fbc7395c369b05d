"""compare.json: what is known of a group, so that a second call costs only what is new."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.checkpoints.store import write_file
from longspan.errors import ConfigError
from longspan.training.recipe import find_recipe

NOTEBOOK, FORMAT = "compare.json", 1


@dataclass
class Notebook:
    """`members` holds a page for each by name: its recipe's file, and what was measured under the key it hangs on."""

    folder: Path
    limit: dict[str, int]
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    contexts: dict[str, dict[str, Any]] = field(default_factory=dict)
    report: str = ""

    def save(self) -> None:
        values = {"format": FORMAT, "limit": self.limit, "members": self.members}
        values |= {"contexts": self.contexts, "report": self.report}
        write_file(self.folder / NOTEBOOK, (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())


def open_notebook(folder: Path, limit: dict[str, int]) -> Notebook:
    """The notebook of a group, which must have the same limit; a new one where the folder is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give the name of a folder")
    path = folder / NOTEBOOK
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--out {folder} is not empty and holds no comparison; choose another folder")
        return Notebook(folder, limit)
    try:
        values = json.loads(path.read_bytes())
        known = {"limit": dict, "members": dict, "contexts": dict, "report": str}
        whole = values["format"] == FORMAT and all(isinstance(values[key], kind) for key, kind in known.items())
        whole = whole and all(isinstance(page, dict) for page in values["members"].values())
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ConfigError(f"{path} is damaged or of another longspan; remove it, the runs beside it stay")
    if values["limit"] != limit:
        # A run that goes on after its schedule has ended is not the run a longer budget would have made.
        raise ConfigError(
            f"{folder} holds a group with {_shown(values['limit'])}, and this one has {_shown(limit)}; "
            "choose another --out, or leave the budget as it was"
        )
    return Notebook(folder, limit, values["members"], values["contexts"], values["report"])


def _shown(limit: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in limit.items()) or "the recipes' own limits"


def name_members(recipes: Sequence[str], notebook: Notebook) -> dict[str, Path]:
    """A name for each recipe, which is its folder's too: the file's own, with its folder before it where two share one.

    A file that has a name in the notebook keeps it, whoever joins the group.
    """
    files = [find_recipe(recipe).resolve() for recipe in recipes]
    for k, file in enumerate(files):
        if file in files[:k]:
            raise ConfigError(f"the recipe {recipes[k]} was named twice ({file}); a group holds each once")
    kept = {Path(str(page.get("recipe"))): name for name, page in notebook.members.items()}
    # The name of a file that is gone is free: the run in its folder is taken up only by the same recipe.
    taken = {name for file, name in kept.items() if file.is_file()}
    stems = [file.stem for file in files if file not in kept]
    named: dict[str, Path] = {}
    for file in files:
        name = kept.get(file)
        if name is None:
            alone = stems.count(file.stem) == 1 and file.stem not in taken
            name = _free(file.stem if alone else f"{file.parent.name or 'root'}-{file.stem}", taken)
        taken.add(name)
        named[name] = file
    return named


def _free(name: str, taken: set[str]) -> str:
    count, found = 1, name
    while found in taken:
        count += 1
        found = f"{name}-{count}"
    return found
