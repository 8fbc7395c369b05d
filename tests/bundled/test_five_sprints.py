"""The sprint card's tables of five variants and of dynamic evaluation match the measurements."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
CARD = (ROOT / "docs" / "cards" / "enwik8-12l-sprint.md").read_text(encoding="utf-8")
FOUND: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "2026-11-16-h200-five-sprints.json").read_text())
MEMBERS = [pytest.param(member, id=member["name"]) for member in FOUND["members"]]


def recl(name: str, group: dict[str, Any]) -> str:
    """The RECL of a member at r = 0.1 with its interval; empty for a member that the contexts do not fit."""
    if name not in group["members"]:
        return ""
    found = group["recl"]["0.1"][name]
    return f"{found['tokens']}{'+' * found['bounded']} [{found['low']}, {found['high']}]"


@pytest.mark.parametrize("member", MEMBERS)
def test_a_row_of_the_table_matches_its_measurement(member: dict[str, Any]) -> None:
    (row,) = [line for line in CARD.splitlines() if line.startswith(f"| {member['name']} | ")]
    lengths = [recl(member["name"], group) for group in FOUND["contexts"]]
    method = f"a stream, memory {member['memory']}" if member["memory"] else f"a window of {member['segment']}"
    cells = [f"{member['steps']:,}", f"{member['tokens_per_second']:,}", f"{member['bits']:.4f}", method, *lengths]
    assert [cell.strip() for cell in row.split("|")][3:-1] == cells


@pytest.mark.parametrize("member", MEMBERS)
def test_the_recipe_matches_the_measurement(member: dict[str, Any]) -> None:
    recipe = load_recipe(member["name"])
    assert recipe.expected.parameters == member["parameters"]
    if member["name"] != FOUND["dynamic"]["model"]:  # its result is of a longer run
        assert (recipe.result.score, recipe.result.seconds) == (round(member["bits"], 4), FOUND["budget"]["seconds"])


def test_the_rate_was_chosen_on_validation_text() -> None:
    readings = FOUND["dynamic"]["readings"]
    for reading in readings:
        rate = f"{reading['rate']:.0e}".replace("e-0", "e-")
        assert f" | {rate} | {reading['bits']:.4f} | {reading['static_bits']:.4f} |\n" in CARD
    tried = {reading["bits"]: reading["rate"] for reading in readings if reading["split"] == "valid"}
    assert [reading["rate"] for reading in readings if reading["split"] == "test"] == [tried[min(tried)]]
