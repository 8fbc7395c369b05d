import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longspan.errors import ConfigError, DataError
from longspan.experiments.scaling.law import Law
from longspan.experiments.scaling.points import Point, read_points, write_csv
from longspan.experiments.scaling.study import Study, bootstrap, differences, gaps, interval, studies, study
from longspan.training.recipe import load_recipe

TRUE = Law(0.9, 40.0, 120.0, 0.35, 0.37)
LONG = bool(os.environ.get("LONGSPAN_TORTURE"))


def points(law: Law = TRUE, *, noise: float = 0.002, seed: int = 0, group: str = "a", models: int = 6) -> list[Point]:
    random = np.random.default_rng(seed)
    return [
        Point(
            f"{N:.0f}-{D}",
            group,
            round(N) + 65536,
            round(N),
            D,
            float(law.loss(round(N), D) * random.lognormal(0, noise)),
            6 * N * D,
        )
        for N in np.geomspace(1e5, 4e7, models)
        for D in (8 << 20, 16 << 20, 32 << 20, 64 << 20)
    ]


def test_intervals_cover_at_the_stated_rate() -> None:
    """95% intervals of both exponents contain the truth, up to chance: binomial with p = 0.95, 4 standard deviations
    and 5% for the few runs."""
    trials, resamples = (100, 300) if LONG else (8, 40)
    inside = 0
    for seed in range(trials):
        table = np.array([(point.non_embedding, point.tokens, point.bits) for point in points(seed=seed, models=6)])
        _, laws, _ = bootstrap(*table.T, resamples, seed)
        for name in ("alpha", "beta"):
            low, high = interval([getattr(law, name) for law in laws])
            inside += low <= getattr(TRUE, name) <= high
    least = 0.95 * 2 * trials - 4 * (2 * trials * 0.95 * 0.05) ** 0.5 - 0.05 * 2 * trials
    assert inside >= least


def test_one_run_far_off_does_not_shift_the_intervals() -> None:
    """They contain their own estimates. Resamples centred at the mean of the residuals were all shifted by the run."""
    runs = points(models=10)
    runs[9] = replace(runs[9], bits=runs[9].bits * 1.5)
    table = np.array([(point.non_embedding, point.tokens, point.bits) for point in runs])
    law, laws, _ = bootstrap(*table.T, 60)
    for name in ("alpha", "beta", "E"):
        low, high = interval([getattr(one, name) for one in laws])
        assert low < getattr(law, name) < high
    low, high = interval([float(one.loss(1e8, 1 << 27)) for one in laws])
    assert low < law.loss(1e8, 1 << 27) < high


def test_gaps_are_between_runs_of_equal_size() -> None:
    def run(group: str, parameters: int, tokens: int, bits: float) -> Point:
        return Point("", group, parameters, parameters, tokens, bits, 0.0)

    first = [run("a", 10, 1, 2.0), run("a", 10, 2, 1.5), run("a", 20, 1, 1.0), run("a", 30, 1, 9.0)]
    second = [run("b", 20, 1, 1.25), run("b", 10, 1, 2.25), run("b", 10, 2, 1.5), run("b", 10, 3, 9.0)]
    second += [run("b", 10, 1, 2.75)]  # a second seed
    (gap,) = gaps([*first, *second])
    assert (gap.first, gap.second, gap.pairs) == ("a", "b", 3)
    assert (gap.lower_quartile, gap.median, gap.upper_quartile) == (0.125, 0.25, 0.375)
    assert gaps([first[0], second[0]]) == []


def test_predicts_the_largest_model_from_the_others() -> None:
    found = study(points(), resamples=30)
    target = found.prediction
    assert target is not None
    assert target.tokens == 64 << 20
    assert target.low <= TRUE.loss(4e7, target.tokens) <= target.high
    assert abs(target.error) < 0.02
    # The losses of the largest model must not influence the prediction.
    changed = [p if p.non_embedding < 4e7 else Point(*{**vars(p), "bits": 9.0}.values()) for p in points()]
    other = study(changed, resamples=30).prediction
    assert other is not None
    assert other.predicted == target.predicted
    assert other.measured == 9.0


def test_groups_with_other_exponents_differ() -> None:
    other = Law(0.9, 100.0, 120.0, 0.45, 0.37)
    found = studies([*points(), *points(seed=1, group="b"), *points(other, seed=2, group="c")], resamples=30)
    assert [one.group for one in found] == ["a", "b", "c"]
    apart = {(one.first, one.second): one for one in differences(found) if one.name == "alpha"}
    assert not apart["a", "b"].clear
    assert apart["a", "c"].clear
    assert apart["a", "c"].low < 0.1 < apart["a", "c"].high


def test_counting_embeddings_changes_the_exponent() -> None:
    """Losses follow N without embeddings. With 65,536 parameters more, small models look larger, so alpha is larger."""
    without, all_of_them = (study(points(noise=0.0), count, resamples=20) for count in ("non_embedding", "parameters"))
    assert without.law.alpha == pytest.approx(0.35, abs=1e-3)
    assert all_of_them.law.alpha > 0.36
    with pytest.raises(ConfigError):
        study(points(), "tokens")


def run_folder(folder: Path, *, steps: int = 10, taken: int = 10, validated: int = 10, **keys: object) -> None:
    """A run as `longspan train` leaves it, without weights."""
    shape = {"family": "'transformer-xl'", "layers": 1, "width": 8, "heads": 2, "inner": 16}
    overrides = [f"model.{key}={value}" for key, value in shape.items()] + [f"training.steps={steps}"]
    recipe = load_recipe("tiny", [*overrides, *(f"training.{key}={value}" for key, value in keys.items())])
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    line = '{{"step": {0}, "tokens": {1}, "bits": 3.0, "tokens_per_second": 1.0, "seconds": 1.0}}\n'
    (folder / "metrics.jsonl").write_text(line.format(taken, 1000))
    (folder / "validation.jsonl").write_text(f'{{"step": {validated}, "bits": 2.5}}\n')
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "recipe.toml").write_text(recipe.to_toml())


def test_points_of_run_folders(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "a", memory=0)
    run_folder(tmp_path / "runs" / "more" / "b", memory=16)
    run_folder(tmp_path / "runs" / "trunk", schedule="constant", cooldown=0.0)
    run_folder(tmp_path / "runs" / "stopped", taken=7, validated=7)
    run_folder(tmp_path / "runs" / "unscored", validated=5)
    found, notes = read_points([tmp_path / "runs"])
    assert [(point.name, point.group) for point in found] == [
        ("a", "training.memory=0"),
        ("more/b", "training.memory=16"),
    ]
    # Wq, Wk, Wv, Wo, Wr; W1, W2 and their biases; two norms; u and w.
    own = 5 * 8 * 8 + 2 * 8 * 16 + 16 + 8 + 4 * 8 + 2 * 8
    assert found[0].non_embedding == own
    assert found[0].parameters == own + 256 * 8 + 256  # the table, and a bias per symbol
    assert (found[0].tokens, found[0].bits) == (1000, 2.5)
    assert found[1].flops > found[0].flops
    assert [note.split()[0] for note in notes] == ["stopped", "unscored", "1"]
    by_family, _ = read_points([tmp_path / "runs" / "a"], "model.family")
    assert by_family[0].group == "model.family=transformer-xl"
    with pytest.raises(ConfigError):
        read_points([tmp_path / "runs" / "a"], "training.nothing")
    with pytest.raises(DataError):
        read_points([tmp_path / "nothing"])


def test_points_survive_a_csv(tmp_path: Path) -> None:
    given = points(models=2)
    write_csv(given, tmp_path / "points.csv")
    assert read_points([tmp_path / "points.csv"]) == (given, [])
    (tmp_path / "bad.csv").write_text("name,group\na,b\n")
    with pytest.raises(DataError):
        read_points([tmp_path / "bad.csv"])


def test_too_few_runs_are_an_error_that_names_the_group() -> None:
    with pytest.raises(DataError, match="few"):
        studies([*points(), *points(group="few", models=1)], resamples=20)
    found: Study = study(points(models=4), resamples=20)
    assert len(found.facts["intervals"]["alpha"]) == 2
