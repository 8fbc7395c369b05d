"""What the sprint's card says of its rivals and of dynamic evaluation, against what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.compare import _length
from longspan.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
CARD = (ROOT / "docs" / "cards" / "enwik8-12l-sprint.md").read_text(encoding="utf-8")
FOUND: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "2026-11-16-h200-five-sprints.json").read_text())
MEMBERS = [pytest.param(member, id=member["name"]) for member in FOUND["members"]]


@pytest.mark.parametrize("member", MEMBERS)
def test_a_row_of_the_table_is_what_was_measured(member: dict[str, Any]) -> None:
    (row,) = [line for line in CARD.splitlines() if line.startswith(f"| {member['name']} | ")]
    lengths = [_length(member["name"], group) for group in FOUND["contexts"]]
    read = f"a stream, memory {member['memory']}" if member["memory"] else f"a window of {member['segment']}"
    told = [f"{member['steps']:,}", f"{member['tokens_per_second']:,}", f"{member['bits']:.4f}", read, *lengths]
    assert [cell.strip() for cell in row.split("|")][3:-1] == told


@pytest.mark.parametrize("member", MEMBERS)
def test_a_recipe_says_so_too(member: dict[str, Any]) -> None:
    recipe = load_recipe(member["name"])
    assert recipe.expected.parameters == member["parameters"]
    if member["name"] != FOUND["dynamic"]["model"]:  # which was trained for longer
        assert (recipe.reached.score, recipe.reached.seconds) == (round(member["bits"], 4), FOUND["budget"]["seconds"])


def test_a_rate_was_chosen_on_validation_text() -> None:
    readings = FOUND["dynamic"]["readings"]
    for reading in readings:
        rate = f"{reading['rate']:.0e}".replace("e-0", "e-")
        assert f" | {rate} | {reading['bits']:.4f} | {reading['static_bits']:.4f} |\n" in CARD
    tried = {reading["bits"]: reading["rate"] for reading in readings if reading["split"] == "valid"}
    assert [reading["rate"] for reading in readings if reading["split"] == "test"] == [tried[min(tried)]]
