"""Schedules against values computed by hand."""

import math

import pytest

from longspan.training.recipe import TrainingConfig, value_at
from longspan.training.schedules import lr_factor, progress


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 0, 0.25),
        ("cosine", 3, 1.0),
        ("cosine", 25, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 50, 0.5),
        ("cosine", 75, 0.5 * (1 - math.sqrt(0.5))),
        ("linear", 1, 0.5),
        ("linear", 50, 0.5),
        ("linear", 99, 0.01),
        ("constant", 2, 0.75),
        ("constant", 99, 1.0),
        ("inverse-sqrt", 3, 1.0),
        ("inverse-sqrt", 15, 0.5),
        ("inverse-sqrt", 99, 0.2),
    ],
)
def test_learning_rates(schedule: str, step: int, expected: float) -> None:
    config = TrainingConfig(steps=100, warmup=4, schedule=schedule)
    assert lr_factor(config, step, step / 100) == pytest.approx(expected, abs=1e-12)


def test_floor_and_cooldown() -> None:
    config = TrainingConfig(steps=100, schedule="constant", cooldown=0.2, lr_floor=0.1)
    assert [lr_factor(config, s, s / 100) for s in (0, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.55, 0.1])
    cosine = TrainingConfig(steps=100, lr_floor=0.1)
    assert lr_factor(cosine, 100, 1.0) == pytest.approx(0.1)


def test_floor_and_cooldown_of_the_slanted_triangle() -> None:
    """Without them it rises from 1/32 to 1 and falls to 1/32 (Howard & Ruder 2018, equation 3)."""
    plain = TrainingConfig(steps=100, schedule="slanted-triangular")
    assert [lr_factor(plain, s, s / 100) for s in (0, 5, 10, 55, 100)] == [1 / 32, 33 / 64, 1.0, 33 / 64, 1 / 32]
    changed = TrainingConfig(steps=100, schedule="slanted-triangular", cooldown=0.5, lr_floor=0.2)
    found = [lr_factor(changed, s, s / 100) for s in (0, 10, 75, 100)]
    middle = (1 + 31 * 0.25 / 0.9) / 32 * 0.5
    assert found == pytest.approx([0.2 + 0.8 / 32, 1.0, 0.2 + 0.8 * middle, 0.2])


def test_progress_follows_the_nearest_limit() -> None:
    config = TrainingConfig(steps=100, tokens=1000, seconds=10.0)
    assert progress(config, 10, 500, 1.0) == 0.5
    assert progress(config, 10, 50, 9.0) == 0.9
    assert progress(config, 10, 5000, 9.0) == 1.0
    assert progress(TrainingConfig(seconds=4.0), 10**6, 10**9, 1.0) == 0.25


def test_values_change_at_their_steps() -> None:
    schedule = ((0, 4), (10, 8), (20, 2))
    assert [value_at(schedule, step) for step in (0, 9, 10, 19, 20, 1000)] == [4, 4, 8, 8, 2, 2]
    assert value_at(16, 5) == 16
