"""`longspan recipes`: the recipes that can be trained by name, with published and own results."""

from longspan.cli.options import Json, print_json


def recipes(json: Json = False) -> None:
    """List every recipe with its published result, our result and what it uses, training time and device."""
    from longspan.experiments.recipe_table import COLUMNS, cell, recipe_rows

    rows = recipe_rows()
    if json:
        print_json({"recipes": rows})
        return
    lines = [COLUMNS, *(tuple(cell(row[column]) for column in COLUMNS) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
