"""Grids, seeds and their spread, by hand."""

from pathlib import Path

import pytest

from longspan.errors import ConfigError
from longspan.experiments.compare.variants import parse_each, parse_grid, spreads, variants


def test_a_grid_is_a_product() -> None:
    grid = parse_grid(["training.lr=0.003, 0.006", "training.batch=[[0, 2], [5, 4]],8"])
    assert grid == {"training.lr": ["0.003", "0.006"], "training.batch": ["[[0, 2], [5, 4]]", "8"]}
    found = variants({"a b": Path("a b.toml")}, grid, [None])
    assert len(found) == 4
    first = next(iter(found.values()))
    assert first.overrides == ("training.lr=0.003", "training.batch=[[0, 2], [5, 4]]")
    assert (first.base, first.group) == ("a b", "a b training.lr=0.003 training.batch=[[0, 2], [5, 4]]")


def test_without_a_grid_names_are_those_of_the_recipes() -> None:
    assert list(variants({"a": Path("a"), "b": Path("b")}, {}, [7])) == ["a", "b"]
    assert list(variants({"a": Path("a")}, {}, [1, 2])) == ["a--seed-1", "a--seed-2"]


def test_each_change_alone_and_none() -> None:
    each = parse_each(["model.qk_norm=false", "model.norm=post,training.batch=[[0, 2], [5, 4]]"])
    found = variants({"a": Path("a")}, {}, [None], each)
    assert [variant.overrides for variant in found.values()] == [
        (),
        ("model.qk_norm=false",),
        ("model.norm=post", "training.batch=[[0, 2], [5, 4]]"),
    ]
    assert list(found)[:2] == ["a", "a--model.qk_norm=false"]
    with pytest.raises(ConfigError, match="combined"):
        variants({"a": Path("a")}, {"training.lr": ["1"]}, [None], each)


@pytest.mark.parametrize("changes", [["model"], ["=1"], ["model.norm="], ["model.norm=post,"], ["a.b=1", "a.b=1"]])
def test_wrong_changes_are_refused(changes: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_each(changes)


@pytest.mark.parametrize("pair", ["lr", "=3", "lr=", "lr=1,,2", "lr=1,1"])
def test_wrong_grids_are_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match=pair.replace("=", ".")):
        parse_grid([pair])


def test_too_many_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="2,000 runs"):
        variants({"a": Path("a")}, {"k": [str(n) for n in range(500)]}, [1, 2, 3, 4])


def test_the_spread_is_mean_and_sample_deviation() -> None:
    bits = {"a1": 1.0, "a2": 2.0, "a3": 6.0, "b": 3.0}
    scores = {name: {"bits": value, "unit": "byte"} for name, value in bits.items()}
    (found,) = spreads({"a1": "a", "a2": "a", "a3": "a", "b": "b"}, scores)
    assert (found.group, found.seeds, found.bits) == ("a", 3, 3.0)
    assert found.deviation == pytest.approx(7**0.5)
