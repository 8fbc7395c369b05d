"""Values that the shell completes: names of recipes, families, pages and keys. Files are completed by the shell."""

from collections.abc import Iterable
from typing import get_args


def recipe_values(incomplete: str) -> list[str]:
    from longspan.training.recipe import recipe_names

    return _starting(incomplete, recipe_names())


def family_values(incomplete: str) -> list[str]:
    from longspan.models.families import known_families

    return _starting(incomplete, known_families())


def page_values(incomplete: str) -> list[str]:
    from longspan.manual import pages

    return _starting(incomplete, pages())


def key_values(incomplete: str) -> list[str]:
    """Keys of a recipe. Those of models are left out, because they need torch and a Tab must not take seconds."""
    from longspan.cli.keys import recipe_keys

    return _starting(incomplete, (key.name for key in recipe_keys()))


def unit_values(incomplete: str) -> list[str]:
    from longspan.scoring.surprisal import Per

    return _starting(incomplete, get_args(Per))


def table_values(incomplete: str) -> list[str]:
    """Written out, because the list in `scoring/surprisal_files.py` needs torch."""
    return _starting(incomplete, ("csv", "jsonl", "parquet"))


def _starting(incomplete: str, values: Iterable[str]) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]
