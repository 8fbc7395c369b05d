"""Parsing of budgets and the check of a model's size."""

import pytest

from longspan.errors import ConfigError
from longspan.experiments.compare.budget import Budget, parse_budget


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
def test_parsing(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("params=41M,steps=10,seconds=5", "seconds=5.*both steps and seconds"),
        ("steps=1,steps=2", "steps=1,steps=2.*twice"),
        ("step=10", "'step'"),
        ("steps", "'steps'"),
        ("steps=0", "'steps=0'"),
        ("steps=-3", "'steps=-3'"),
        ("steps=1.5", r"'steps=1\.5'"),
        ("params=41G", "'params=41G'"),
        ("params=nan", "'params=nan'"),
        ("seconds=1e3", "'seconds=1e3'"),
        ("steps=１", "'steps=１'"),
        ("params=999999999999999M", "'params=999999999999999M'"),
    ],
)
def test_wrong_budgets_are_refused(text: str, values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        parse_budget(text)


@pytest.mark.parametrize("count", [98_000, 100_000, 102_000])
def test_two_percent_is_allowed(count: int) -> None:
    parse_budget("params=100K").check_size(count)


@pytest.mark.parametrize(("count", "off"), [(97_900, "2.1% fewer"), (102_100, "2.1% more"), (300_000, "200.0% more")])
def test_a_wrong_size_is_refused_with_the_difference(count: int, off: str) -> None:
    with pytest.raises(ConfigError, match=f"{count:,} parameters, {off} .*100,000"):
        parse_budget("params=100K").check_size(count)
