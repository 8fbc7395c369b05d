"""`longspan recipes`: the recipes that can be trained by name, with published and own results."""

from typing import Any

from longspan.cli.options import Json, print_json

_SHORT = {"bits per byte": "bpb", "bits per character": "bpc", "perplexity": "ppl"}


def recipes(json: Json = False) -> None:
    """List every recipe with its published result and ours.

    --json adds the extra methods, the training time and the device of our result.
    """
    from longspan.experiments.recipe_table import recipe_rows

    rows = recipe_rows()
    if json:
        print_json({"recipes": rows})
        return
    lines = [("recipe", "family", "size", "data", "published", "ours"), *map(_line, rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    print("\n* uses more than the published result, such as a pointer or a temperature (see --json)")
    print("bpb: bits per byte, bpc: bits per character, ppl: perplexity")


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    ours = row["comparable"] or (f"{row['best']}*" if row["best"] else "-")
    scores = [_shortened(str(row["published"] or "-")), _shortened(ours)]
    size = row["parameters"]
    shown = f"{size / 1e6:.1f}M" if size >= 1e6 else f"{size / 1e3:.0f}K"
    return (row["recipe"], row["family"], shown, str(row["data"])[:16], *scores)


def _shortened(score: str) -> str:
    for unit, short in _SHORT.items():
        score = score.replace(unit, short)
    return score
