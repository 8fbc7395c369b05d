"""Segments of random length: the distribution of Merity et al. 2017, determined by seed and step."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.recipe import TrainingConfig, build_recipe
from longspan.training.schedules import lr_factor, segment_at
from tests.training.conftest import make_recipe, make_text, train


def normal_share(below: float) -> float:
    return 0.5 * (1 + math.erf(below / math.sqrt(2)))


def test_lengths_have_the_stated_distribution() -> None:
    """The fraction below some lengths against that of the mixture, within four standard errors."""
    config, count = TrainingConfig(steps=1, segment_jitter=5.0, seed=3), 20_000
    lengths = np.array([segment_at(config, 70, step) for step in range(count)])
    for edge in (25, 35, 45, 60, 66, 70, 74, 80):
        expected = 0.95 * normal_share((edge - 70) / 5) + 0.05 * normal_share((edge - 35) / 5)
        error = math.sqrt(expected * (1 - expected) / count)
        assert abs((lengths < edge).mean() - expected) < 4 * error, edge
    half = lengths < 52
    assert abs(half.mean() - 0.05) < 0.006
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.03, "lengths are correlated"


def test_a_length_depends_only_on_seed_and_step() -> None:
    config = TrainingConfig(steps=1, segment_jitter=5.0, seed=2**62)
    again = [segment_at(config, 70, step) for step in reversed(range(50))][::-1]
    assert again == [segment_at(config, 70, step) for step in range(50)]
    other = TrainingConfig(steps=1, segment_jitter=5.0, seed=8)
    assert again != [segment_at(other, 70, step) for step in range(50)]


def test_lengths_have_a_minimum_and_are_constant_without_jitter() -> None:
    wild = TrainingConfig(steps=1, segment_jitter=100.0)
    assert min(segment_at(wild, 70, step) for step in range(300)) == 5
    assert min(segment_at(wild, 3, step) for step in range(300)) == 3
    assert {segment_at(TrainingConfig(steps=1), 70, step) for step in range(300)} == {70}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_has_that_length_and_a_proportional_learning_rate(optimizer: str) -> None:
    recipe = make_recipe(training_segment_jitter=3.0, training_optimizer=optimizer, training_seed=5, training_steps=30)
    _, trainer = run.make_trainer(recipe, make_text(7000), torch.device("cpu"))
    rows = []
    trainer._report = rows.extend  # type: ignore[method-assign]
    for _ in range(30):
        trainer.take_step()
    lengths = [segment_at(recipe.training, 8, step) for step in range(30)]
    assert len(set(lengths)) > 4
    assert np.diff([0, *(row.tokens for row in rows)]).tolist() == [4 * length for length in lengths]
    for step, row in enumerate(rows):
        assert row.lr == pytest.approx(0.01 * lr_factor(recipe.training, step, step / 30) * lengths[step] / 8)


@pytest.mark.parametrize("family", ["sparse", "bigbird"])
def test_segments_beyond_the_learned_positions_are_refused_before_the_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"family": family, "layers": 1, "width": 16, "heads": 2, "inner": 24, "max_distance": 7}
    recipe = build_recipe(
        {"model": shape, "training": {"steps": 2, "batch": 4, "segment": 8, "segment_jitter": 3.0}}, "small"
    )
    named = r"training.segment_jitter=3.0 .* 23.* 8 "
    with pytest.raises(ConfigError, match=named):
        train(recipe, tmp_path / "run", make_text(), monkeypatch)
    assert not (tmp_path / "run").exists()


def test_jitter_excludes_compile_and_may_not_change_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"training.segment_jitter=3.0.*training.compile=true"):
        make_recipe(training_segment_jitter=3.0, training_compile=True)
    with pytest.raises(ConfigError, match=r"training.segment_jitter=-1.0"):
        make_recipe(training_segment_jitter=-1.0)
    recipe = make_recipe(training_segment_jitter=3.0, training_steps=2)
    train(recipe, tmp_path, make_text(), monkeypatch)
    with pytest.raises(ConfigError, match=r"training.segment_jitter=3.0.* 2.0;"):
        train(make_recipe(training_segment_jitter=2.0), tmp_path, make_text(), monkeypatch, resume="auto")
