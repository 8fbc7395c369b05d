"""The recipes that come with longspan, with published and own results."""

import tomllib
from typing import Any

from longspan.models.families import outline
from longspan.training.recipe import find_recipe, load_recipe, recipe_names

HEADER = ("recipe", "family", "parameters", "score", "published", "differs from the paper", "scored on", "training")
"""The columns of docs/results.md."""


def recipe_rows() -> list[dict[str, Any]]:
    return [recipe_row(name) for name in recipe_names()]


def recipe_row(name: str) -> dict[str, Any]:
    """A recipe by column. Parameters are counted with the vocabulary that the recipe states. Our result is `comparable`
    if it uses nothing that a published one does not, and otherwise our `best`."""
    recipe = load_recipe(name)
    expected, result = recipe.expected, recipe.result
    score = _score(name, "result", result.unit)
    return {
        "recipe": recipe.name,
        "family": recipe.family,
        "parameters": outline(recipe.family, recipe.model).parameter_count,
        "data": recipe.data.corpus,
        "published": _score(name, "expected", expected.unit),
        "comparable": None if result.uses else score,
        "best": score if result.uses else None,
        "uses": result.uses,
        "on": result.on,
        "seconds": result.seconds,
        "device": result.device,
    }


def result_tables() -> dict[str, list[str]]:
    """The lines of docs/results.md: for each corpus, the recipes that have a result."""
    tables: dict[str, list[str]] = {}
    for row in recipe_rows():
        if row["on"] is not None:
            training = f"{row['seconds']:g} s, {row['device']}"
            score, published = row["comparable"] or row["best"], row["published"] or "-"
            cells = row["recipe"], row["family"], f"{row['parameters']:,}", score, published
            line = " | ".join((*cells, row["uses"] or "-", row["on"], training))
            tables.setdefault(str(row["data"]), []).append(f"| {line} |")
    return tables


def _score(name: str, table: str, unit: str | None) -> str | None:
    """A score with the digits of the recipe's file: a float would print 24.0 as 24."""
    written = tomllib.loads(find_recipe(name).read_text(encoding="utf-8-sig"), parse_float=str)
    score = written.get(table, {}).get("score")
    return None if score is None else f"{score} {unit or ''}".rstrip()
