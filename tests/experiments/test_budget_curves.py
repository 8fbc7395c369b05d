import math
import re
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import ConfigError, DataError
from longspan.experiments.budget_curves import (
    compare_lines,
    crossings,
    lines_of,
    memory_way,
    read_budget_runs,
    ways_of,
)
from longspan.experiments.budget_figures import draw_budgets, draw_memories
from longspan.training.recipe import load_recipe
from tests.experiments.scaling.test_study import run_folder


def test_crossings_by_hand() -> None:
    """In log x, (1, 4) to (100, 2) and (1, 3) to (100, 3) cross half way, at 10."""
    assert crossings([(1, 4), (100, 2)], [(1, 3), (100, 3)]) == pytest.approx([10.0])
    assert crossings([(1, 4), (100, 2)], [(1, 1), (100, 1)]) == []
    # Only the shared range counts: 10 to 100, where the first falls from 3 to 2.
    assert crossings([(1, 4), (100, 2)], [(10, 2.5), (1000, 2.5)]) == pytest.approx([10**1.5])
    assert crossings([(1, 1), (10, 3), (100, 1)], [(1, 2), (100, 2)]) == pytest.approx([math.sqrt(10), 10**1.5])


def test_runs_of_a_curve(tmp_path: Path) -> None:
    run_folder(tmp_path / "with" / "steps-10", memory=16)
    run_folder(tmp_path / "with" / "trunk", schedule="constant", cooldown=0.0)
    (found,) = read_budget_runs([tmp_path / "with"])
    assert (found.curve, found.steps, found.tokens, found.seconds) == ("with", 10, 1000, 1000.0)
    run_folder(tmp_path / "other" / "with" / "steps-10")
    both = [tmp_path / "with", tmp_path / "other" / "with"]
    assert [one.curve for one in read_budget_runs(both)] == [str(folder) for folder in both]
    with pytest.raises(ConfigError, match="twice"):
        read_budget_runs([both[0], both[0]])
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError):
        read_budget_runs([tmp_path / "none"])


def test_ways_clamp_and_discount_only_beyond_training() -> None:
    recipe = load_recipe("tiny", ["training.segment=32", "training.memory=32", "evaluation.temperature=1.2"])
    found = {memory: memory_way(recipe, memory, 2.0) for memory in (0, 32, 64, 256)}
    assert (found[0].name, found[0].reading.memory, found[0].reading.segment) == ("segments", 0, 32)
    streams = [found[memory].reading for memory in (32, 64, 256)]
    assert {(way.clamp, way.same_length) for way in streams} == {(63, True)}
    assert [way.discount for way in streams] == [0.0, 0.0, 2.0]  # 64 keys are distances 0 to 63
    assert {way.reading.temperature for way in found.values()} == {1.0}


def test_a_run_without_memory_is_scored_in_segments_and_windows() -> None:
    keys = ["training.segment=32", "training.memory=0", "evaluation.memory=0", "evaluation.same_length=false"]
    recipe = load_recipe("tiny", keys)
    ways = ways_of(recipe, [0, 64], [256], 2.0, 4, largest=False)
    assert [(way.name, way.reading.memory, way.stride) for way in ways] == [("segments", 0, 1), ("window", 0, 4)]
    assert {way.reading.segment for way in ways} == {32}
    ways = ways_of(recipe, [0, 64], [256], 2.0, 4, largest=True)
    assert len(ways) == len(set(ways)) == 6
    assert [(way.reading.memory, way.reading.discount) for way in ways if way.name == "memory"] == [
        (64, 2.0),
        (256, 2.0),
        (64, 0.0),
        (256, 0.0),
    ]
    assert {way.reading.clamp for way in ways if way.name == "memory"} == {31}


def row(curve: str, steps: int, trained: int, *scores: tuple[str, int, float, float]) -> dict[str, Any]:
    names = ("way", "memory", "discount", "bits")
    found = [dict(zip(names, one, strict=True)) | {"stride": 8 if one[0] == "window" else 1} for one in scores]
    return {"curve": curve, "steps": steps, "tokens": 100 * steps, "seconds": float(steps * (1 + (trained > 0)))} | {
        "trained_memory": trained,
        "scores": found,
    }


ROWS = [
    row("with", 10, 32, ("segments", 0, 0.0, 5.0), ("memory", 64, 0.0, 4.0)),
    # A memory that only the largest run has does not count, or the curve would bend there.
    row("with", 40, 32, ("segments", 0, 0.0, 3.0), ("memory", 64, 0.0, 2.0), ("memory", 256, 2.0, 1.5)),
    row("without", 10, 0, ("segments", 0, 0.0, 3.5), ("window", 0, 0.0, 3.0)),
    row("without", 80, 0, ("segments", 0, 0.0, 3.4), ("memory", 64, 2.0, 1.0), ("window", 0, 0.0, 3.0)),
]


def test_lines_take_the_best_memory_and_both_ways_without() -> None:
    lines = lines_of(ROWS)
    bits = {label: [point["bits"] for point in points] for label, points in lines.items()}
    assert bits == {
        "with": [4.0, 2.0],
        "without, segments as trained": [3.5, 3.4],
        "without, a window per 8 tokens": [3.0, 3.0],
    }
    pairs = compare_lines(lines, {label: label.partition(",")[0] for label in lines})
    assert {(pair["first"], pair["second"]) for pair in pairs} == {("with", label) for label in list(lines)[1:]}
    found = {pair["against"]: pair for pair in pairs if "window" in pair["second"]}
    # By tokens the lines fall from 4 to 2 and stay at 3 between 10 and 40 steps, so they cross at 20.
    (crossing,) = found["tokens"]["crossings"]
    assert (crossing["tokens"], crossing["bits"]) == (pytest.approx(2000), pytest.approx(3))
    assert found["tokens"]["first_minus_second"] == pytest.approx(-1)
    # A step with memory takes twice the time: 20 seconds to 80 against 10 to 80.
    (crossing,) = found["seconds"]["crossings"]
    assert crossing["seconds"] == pytest.approx(40)


def test_figures_have_all_lines_and_crossings(tmp_path: Path) -> None:
    lines = lines_of(ROWS)
    pairs = compare_lines(lines, {label: label.partition(",")[0] for label in lines})
    draw_budgets(lines, pairs, tmp_path, "a title", "byte")
    draw_memories(ROWS, tmp_path, "a title", "byte")
    budgets, memories = (texts(tmp_path / f"{name}.svg") for name in ("budgets", "memories"))
    assert {*lines, "a title", "0.667 min", "0.002 M", "loss (bits per byte)"} <= budgets
    assert {"with, discount: 1.5000 at 256", "with, clamp only: 2.0000 at 64", "64", "256"} <= memories
    assert {"without, discount: 1.0000 at 64", "without, a window per 8 tokens: 3.0000"} <= memories


def texts(figure: Path) -> set[str]:
    """The texts of an SVG, which matplotlib writes as comments next to their outlines."""
    return {found.strip() for found in re.findall(r"<!--(.*?)-->", figure.read_text())}
