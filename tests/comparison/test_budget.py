"""Budgets as they are written, and what they refuse."""

import pytest

from longspan.comparison.budget import Budget, parse_budget
from longspan.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("", Budget()),
        ("params=41M,steps=1000", Budget(41_000_000, 1000)),
        ("params=890K", Budget(890_000)),
        ("params=1.5m, seconds=600", Budget(1_500_000, None, 600)),
        ("seconds=10,params=890112", Budget(890_112, None, 10)),
    ],
)
def test_what_is_written_is_meant(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("params=41M,steps=10,seconds=5", "both steps and seconds"),
        ("steps=1,steps=2", "steps twice"),
        ("step=10", "'step'"),
        ("steps", "'steps'"),
        ("steps=0", "above 0"),
        ("steps=-3", "above 0"),
        ("steps=1.5", "whole number"),
        ("params=41G", "whole number"),
        ("params=nan", "whole number"),
        ("seconds=1e3", "whole number"),
        ("steps=１", "whole number"),
        ("params=999999999999999M", "whole number"),
    ],
)
def test_what_is_no_budget_is_told(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_budget(text)


@pytest.mark.parametrize("count", [98_000, 100_000, 102_000])
def test_two_percent_are_let_pass(count: int) -> None:
    parse_budget("params=100K").check_size(count)


@pytest.mark.parametrize(("count", "off"), [(97_900, "2.1% fewer"), (102_100, "2.1% more"), (300_000, "200.0% more")])
def test_more_is_told_by_how_much(count: int, off: str) -> None:
    with pytest.raises(ConfigError, match=f"{count:,} parameters, {off} than the budget of 100,000"):
        parse_budget("params=100K").check_size(count)
