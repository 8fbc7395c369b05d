"""`longspan config`: every key of a recipe, with its default."""

from typing import Annotated

import typer

from longspan.cli.completion import family_values, key_values
from longspan.cli.keys import all_keys, key_lines
from longspan.cli.options import Json, print_json
from longspan.errors import UnknownNameError


def config(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", autocompletion=key_values, help="A key or a table, for example training.lr or data."
        ),
    ] = "",
    family: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=family_values, help="List only the keys of this family, with its defaults."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the keys of recipes, for --set and TOML files, with their defaults.

    The defaults of model keys depend on the family: the most common one is first, then the others with their families.
    """
    keys = all_keys(family)
    chosen = [one for one in keys if not key or one.name == key or one.name.startswith(f"{key}.")]
    if not chosen:
        raise UnknownNameError("key", key, [one.name for one in keys])
    if json:
        print_json({"keys": [one._asdict() for one in chosen]})
        return
    print("\n".join(key_lines(chosen)))
