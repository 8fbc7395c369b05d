import math
from pathlib import Path

import pytest

from longspan.errors import DataError
from longspan.experiments.budget_curves import crossings, read_budget_runs, readings
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
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError):
        read_budget_runs([tmp_path / "none"])


def test_readings_clamp_and_discount_only_beyond_training() -> None:
    recipe = load_recipe("tiny", ["training.segment=32", "training.memory=32"])
    found = readings(recipe, [0, 32, 63, 256], 2.0)
    assert (found[0].memory, found[0].segment, found[0].same_length) == (0, 32, False)
    assert {found[memory].clamp for memory in (32, 63, 256)} == {63}
    assert [found[memory].discount for memory in (32, 63, 256)] == [0.0, 0.0, 2.0]
    assert all(found[memory].same_length for memory in (32, 63, 256))
