"""The cards of trained recipes against the recipes, and nothing in them chosen on test text."""

import re
from pathlib import Path

import pytest

from longspan.cli.main import run
from longspan.data import open_corpus
from longspan.data.cache import cache_folder
from longspan.training.recipe import load_recipe

from .card import FIGURE, ROOT, is_known, number, steps_and_tokens, tokens_read, value

CARDS = sorted((ROOT / "docs" / "cards").glob("*.md"))
TRAINING_TOKENS = {"enwik8": 90_000_000, "ptb": 929_589}

pytestmark = pytest.mark.parametrize("card", [pytest.param(path, id=path.stem) for path in CARDS])


def test_it_tells_of_its_recipe(card: Path) -> None:
    recipe, told = load_recipe(card.stem), card.read_text(encoding="utf-8")
    assert value(told, r"\n([\d,]+) parameters, ") == f"{recipe.expected.parameters:,}"
    assert value(told, r" parameters, ([\d,]+) seconds of training") == f"{recipe.reached.seconds:,.0f}"
    assert f"`longspan train --recipe {card.stem} --out RUN`" in told


def test_the_validation_split_chose(card: Path) -> None:
    recipe, told = load_recipe(card.stem), card.read_text(encoding="utf-8")
    found = FIGURE.findall(told)
    rows = [(*row[:3], float(row[3]), re.findall("--(temp|dynamic-rate) ([^ ]+)", row[4])) for row in found]
    static, dynamic = ([row for row in rows if ("dynamic" in row[0]) == learns] for learns in (False, True))
    for read in (static, dynamic):
        tried = [row for row in read if row[0].partition(",")[0].endswith("valid")]
        chosen = {(row[1], row[2], *row[4]) for row in read if row not in tried}
        assert len(chosen) <= 1
        if tried:
            lowest = min(row[3] for row in tried)  # as rounded: several readings may share it
            assert chosen
            assert chosen <= {(row[1], row[2], *row[4]) for row in tried if row[3] == lowest}
    test = [row for row in static if row[0].endswith("test")]
    own = (str(recipe.evaluation.memory), str(recipe.evaluation.clamp or 0), recipe.reached.score)
    assert [row[1:4] for row in test] == [own]


def test_every_command_is_one(card: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for *_, words in FIGURE.findall(card.read_text(encoding="utf-8")):
        assert run(["eval", "no-such-model", *words.split()]) == 2
        assert "no-such-model" in capsys.readouterr().err


def test_the_code_and_the_text_are_known(card: Path) -> None:
    told, recipe = card.read_text(encoding="utf-8"), load_recipe(card.stem)
    assert is_known(value(told, r"\| code \| commit ([0-9a-f]{40}) \|"))
    fingerprint = value(told, r"\| training text \| fingerprint \| ([0-9a-f]{64}) \|")
    if (cache_folder() / "corpora" / recipe.data.corpus).is_dir():
        text = open_corpus(recipe.data.corpus, "train")
        assert (fingerprint, TRAINING_TOKENS[recipe.data.corpus]) == (text.fingerprint, len(text))


def test_the_tokens_are_those_of_the_steps(card: Path) -> None:
    recipe, told = load_recipe(card.stem), card.read_text(encoding="utf-8")
    batch, segment = recipe.training.batch, recipe.training.segment or recipe.model.segment
    assert isinstance(batch, int)  # schedules would need their steps added up
    assert isinstance(segment, int)
    steps, tokens = steps_and_tokens(told)
    assert tokens == tokens_read(steps, TRAINING_TOKENS[recipe.data.corpus], batch, segment)


def test_the_bound_is_what_it_says(card: Path) -> None:
    told = card.read_text(encoding="utf-8")
    if "Whoever has the\nwhole text" not in told:
        pytest.skip("it bounds no shorter text")
    numbers = re.findall(r"at most ([\d,]+) / ([\d,]+) x ([\d.]+) = ([\d.]+) on it", told)
    ((whole, kept, score, bound),) = ([float(word.replace(",", "")) for word in found] for found in numbers)
    lengths = (number(told, r"its test split has ([\d,]+) tokens"), number(told, r" tokens, this one ([\d,]+)\."))
    assert (kept, whole) == lengths
    assert kept < whole
    static = [float(row[3]) for row in FIGURE.findall(told) if row[0].endswith("--split test")]
    assert [score] == static
    assert bound == pytest.approx(whole / kept * score, abs=1.1e-4)  # computed before the score was rounded
