"""`longspan recipes`: every recipe, with figures that stand in its file."""

from pathlib import Path

from longspan.cli.recipes import COLUMNS, facts, shown
from longspan.training.recipe import load_recipe, recipe_names

from .conftest import Cli

README = Path(__file__).parents[2] / "README.md"


def test_every_recipe_is_listed_with_what_its_file_says(cli: Cli) -> None:
    rows = {row["recipe"]: row for row in cli("recipes", "--json").json["recipes"]}
    assert set(rows) == set(recipe_names())
    base = rows["enwik8-base"]
    assert (base["family"], base["parameters"], base["data"]) == ("transformer-xl", 41_055_436, "enwik8-authors")
    assert base["published"] == "1.06 bits per character"
    for name, row in rows.items():
        recipe = load_recipe(name)
        assert (row["seconds"], row["device"]) == (recipe.reached.seconds, recipe.reached.device)
        assert (row["ours"] is None) == (row["on"] is None) == (recipe.reached.score is None)
        if recipe.reached.score is not None:
            assert row["ours"].startswith(f"{recipe.reached.score:g} ")


def test_people_get_a_table(cli: Cli) -> None:
    lines = cli("recipes").out.splitlines()
    assert lines[0].split()[:3] == ["recipe", "family", "parameters"]
    assert len(lines) == 1 + len(recipe_names())
    reached = f"{load_recipe('demo').reached.score:g} bits per byte"
    assert any(line.startswith("demo ") and reached in line for line in lines)


def test_the_readme_shows_what_has_been_reached() -> None:
    rows = [facts(load_recipe(name)) for name in recipe_names()]
    reached = [f"| {' | '.join(shown(row[column]) for column in COLUMNS)} |" for row in rows if row["ours"]]
    lines = README.read_text().splitlines()
    begin = lines.index(f"| {' | '.join(COLUMNS)} |")
    assert lines[begin + 2 : begin + 3 + len(reached)] == [*reached, ""]
