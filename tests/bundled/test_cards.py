"""The cards of trained recipes: they match their recipes, and only the validation split chose settings."""

import re
from pathlib import Path

import pytest

from longspan.cli.main import run
from longspan.data import open_corpus
from longspan.data.cache import cache_folder
from longspan.training.recipe import load_recipe

from .cards import ROOT, RecipeRow, is_known, number, recipe_rows, steps_and_tokens, tokens_read, value

CARDS = sorted((ROOT / "docs" / "cards").glob("*.md"))
TRAINING_TOKENS = {"enwik8": 90_000_000, "enwik8-authors": 88_982_818, "ptb": 929_589, "wikitext-2": 2_088_628}

pytestmark = pytest.mark.parametrize("card", [pytest.param(path, id=path.stem) for path in CARDS])


def measurements(card: Path) -> list[list[RecipeRow]]:
    """The rows of each table."""
    found = [recipe_rows(section) for section in card.read_text(encoding="utf-8").split("\n## ")]
    return [rows for rows in found if rows]


def test_the_card_matches_its_recipe(card: Path) -> None:
    recipe, text = load_recipe(card.stem), card.read_text(encoding="utf-8")
    assert value(text, r"\n([\d,]+) parameters, ") == f"{recipe.expected.parameters:,}"
    assert value(text, r" parameters, ([\d,]+) seconds of training") == f"{recipe.result.seconds:,.0f}"
    assert f"`longspan train --recipe {card.stem} --out RUN`" in text


def test_the_validation_split_chose_the_settings(card: Path) -> None:
    for table in measurements(card):
        for learns in (False, True):
            rows = [row for row in table if row.is_dynamic == learns]
            tried = [row for row in rows if row.split == "valid"]
            final = [row for row in rows if row.split != "valid"]
            helped = {row.settings for row in final if not row.is_baseline}
            assert len(helped) <= 1
            if tried:
                lowest = min(row.score for row in tried)  # as rounded: several rows may share it
                winners = [row for row in tried if row.score == lowest]
                assert final
                assert helped <= {row.settings for row in winners}
                assert helped or any(row.is_comparable for row in winners)
                assert {row.context for row in final} <= {row.context for row in winners}


def test_the_result_of_the_recipe_is_the_best_on_the_validation_split(card: Path) -> None:
    recipe = load_recipe(card.stem)
    static = [[row for row in table if not row.is_dynamic] for table in measurements(card)]
    best = min(static, key=lambda rows: min(row.score for row in rows if row.split == "valid"))
    tests = [row for row in best if row.split == "test"]
    helped = re.search("pointer|temperature", recipe.result.uses or "") is not None
    (test,) = (row for row in tests if (not row.is_baseline if helped else row.is_comparable))
    reading = recipe.evaluation_reading()
    far = (reading.clamp, reading.discount) if reading.memory > reading.clamp else (0, 0)  # else they have no effect
    assert test.context == (reading.memory, *far)
    assert test.score == recipe.result.score


def test_comparable_and_best_results_have_their_own_columns(card: Path) -> None:
    for table in measurements(card):
        for row in table:
            assert (row.best is None) == row.is_comparable, row
            if row.best is None or row.comparable is None:
                continue
            same = [other for other in table if (other.text, other.context) == (row.text, row.context)]
            assert row.comparable in {other.score for other in same if other.is_comparable}


def test_every_command_parses(card: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in recipe_rows(card.read_text(encoding="utf-8")):
        assert run(["eval", "no-such-model", *row.command.split()]) == 2
        assert "no-such-model" in capsys.readouterr().err


def test_the_commit_and_the_training_text_are_known(card: Path) -> None:
    text, recipe = card.read_text(encoding="utf-8"), load_recipe(card.stem)
    assert is_known(value(text, r"\| code \| commit ([0-9a-f]{40}) \|"))
    fingerprint = value(text, r"\| training text \| fingerprint \| ([0-9a-f]{64}) \|")
    if (cache_folder() / "corpora" / recipe.data.corpus).is_dir():
        corpus = open_corpus(recipe.data.corpus, "train")
        assert (fingerprint, TRAINING_TOKENS[recipe.data.corpus]) == (corpus.fingerprint, len(corpus))


def test_the_tokens_follow_from_the_steps(card: Path) -> None:
    recipe, text = load_recipe(card.stem), card.read_text(encoding="utf-8")
    batch, (reading,) = recipe.training.batch, recipe.training_readings()
    assert isinstance(batch, int)  # with a schedule the tokens of all steps would have to be added up
    steps, tokens = steps_and_tokens(text)
    assert tokens == tokens_read(steps, TRAINING_TOKENS[recipe.data.corpus], batch, reading.segment)


def test_the_upper_bound_is_computed_from_the_results(card: Path) -> None:
    text = card.read_text(encoding="utf-8")
    if "drops symbols from the same files" not in text:
        pytest.skip("no bound for a shorter text")
    numbers = re.findall(r"at most ([\d,]+) / ([\d,]+) x ([\d.]+) = ([\d.]+) per token", text)
    ((total, kept, score, bound),) = ([float(word.replace(",", "")) for word in found] for found in numbers)
    lengths = (number(text, r"its test split has ([\d,]+) tokens"), number(text, r" tokens, this one ([\d,]+)\."))
    assert (kept, total) == lengths
    assert kept < total
    table = next(rows for rows in measurements(card) if any("authors" in row.text for row in rows))
    assert [score] == [row.score for row in table if row.split == "test" and not row.is_dynamic]
    assert bound == pytest.approx(total / kept * score, abs=1.1e-4)  # computed before the score was rounded
