"""`longspan recipes`: what can be trained by name, what it should come to and what it has come to here."""

from typing import TYPE_CHECKING, Any

from longspan.cli.options import Json, print_json

if TYPE_CHECKING:
    from longspan.training.recipe import Recipe

COLUMNS = ("recipe", "family", "parameters", "data", "published", "ours", "on", "seconds", "device")


def recipes(json: Json = False) -> None:
    """Every recipe by name, with its published result, ours, how long it took and on what."""
    from longspan.training.recipe import load_recipe, recipe_names

    rows = [facts(load_recipe(name)) for name in recipe_names()]
    if json:
        print_json({"recipes": rows})
        return
    lines = [COLUMNS, *(tuple(shown(row[column]) for column in COLUMNS) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def facts(recipe: "Recipe") -> dict[str, Any]:
    """One line of the table. Parameters are counted, as of the vocabulary the recipe states."""
    from longspan.models.families import outline

    expected, reached = recipe.expected, recipe.reached
    return {
        "recipe": recipe.name,
        "family": recipe.family,
        "parameters": outline(recipe.family, recipe.model).parameter_count,
        "data": recipe.data.corpus,
        "published": _result(expected.score, expected.unit),
        "ours": _result(reached.score, reached.unit),
        "on": reached.on,
        "seconds": reached.seconds,
        "device": reached.device,
    }


def _result(score: float | None, unit: str | None) -> str | None:
    return None if score is None else f"{score:g} {unit or ''}".rstrip()


def shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
