"""`longspan recipes`: every recipe, with the results of its file."""

from pathlib import Path

from longspan.experiments.recipe_table import HEADER, result_tables
from longspan.training.recipe import load_recipe, recipe_names

from .conftest import Cli

RESULTS = Path(__file__).parents[2] / "docs" / "results.md"


def test_every_recipe_is_listed_with_the_results_of_its_file(cli: Cli) -> None:
    rows = {row["recipe"]: row for row in cli("recipes", "--json").json["recipes"]}
    assert set(rows) == set(recipe_names())
    base = rows["enwik8-base"]
    assert (base["family"], base["parameters"], base["data"]) == ("transformer-xl", 41_055_436, "enwik8-authors")
    assert base["published"] == "1.06 bits per character"
    for name, row in rows.items():
        result = load_recipe(name).result
        assert (row["uses"], row["seconds"], row["device"]) == (result.uses, result.seconds, result.device)
        scores = [row[column] for column in ("comparable", "best") if row[column] is not None]
        assert len(scores) == (row["on"] is not None) == (result.score is not None)
        if result.score is not None:
            assert float(scores[0].split()[0]) == result.score


def test_scores_have_the_digits_of_the_recipe(cli: Cli) -> None:
    published = {row["recipe"]: row["published"] for row in cli("recipes", "--json").json["recipes"]}
    assert published["enwik8-longformer"] == "1.00 bits per character"
    assert published["wt103-base"] == "24.0 perplexity"


def test_only_a_result_that_uses_nothing_more_than_a_published_one_is_comparable(cli: Cli) -> None:
    rows = {row["recipe"]: row for row in cli("recipes", "--json").json["recipes"]}
    assert rows["ptb-longspan-xl"]["uses"] == "pointer, temperature 1.06"
    assert rows["enwik8-12l-sprint"]["uses"] == "newlines kept"
    assert rows["enwik8-authors-sprint"]["comparable"] == "1.0651 bits per byte"
    for name, row in rows.items():
        if row["uses"] is None:
            assert row["best"] is None
        else:
            assert row["comparable"] is None
        if row["on"] is not None:
            assert ("pointer" in (row["uses"] or "")) == bool(load_recipe(name).evaluation_reading().pointer)


def test_the_default_output_is_a_table(cli: Cli) -> None:
    lines = cli("recipes").out.splitlines()
    assert lines[0].split()[:3] == ["recipe", "family", "size"]
    assert max(map(len, lines)) <= 100
    assert len(lines) == 1 + len(recipe_names()) + 3
    result = f"{load_recipe('demo').result.score:g} bpb"
    assert any(line.startswith("demo ") and result in line for line in lines)


def test_the_results_page_shows_every_result() -> None:
    """A table per corpus, with exactly these rows."""
    lines, tables = RESULTS.read_text().splitlines(), result_tables()
    begins = [n for n, line in enumerate(lines) if line == f"| {' | '.join(HEADER)} |"]
    found = [lines[begin + 2 : lines.index("", begin)] for begin in begins]
    assert sorted(found) == sorted(tables.values())
