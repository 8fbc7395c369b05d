import numpy as np
import pytest

from longspan.errors import DataError
from longspan.experiments.scaling.law import DELTA, Law, fit, fit_batch, huber, project

TRUE = Law(0.9, 40.0, 120.0, 0.35, 0.37)


def design(models: int = 9) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.geomspace(1e5, 4e7, models), 4), np.tile([8e6, 16e6, 32e6, 64e6], models)


def test_case_computed_by_hand() -> None:
    """L = 1 + 2 / N + 4 / D for N, D in 1, 2, 4."""
    N = np.array([1.0, 1, 1, 2, 2, 2, 4, 4, 4])
    D = np.array([1.0, 2, 4, 1, 2, 4, 1, 2, 4])
    L = np.array([7.0, 5, 4, 6, 4, 3, 5.5, 3.5, 2.5])
    found = fit(N, D, L)
    numbers = (found.E, found.A, found.B, found.alpha, found.beta)
    np.testing.assert_allclose(numbers, (1, 2, 4, 1, 1), rtol=1e-6)
    # 48 FLOPs: N D = 8. 2 / N + 4 / D is lowest where both terms are equal, N = 2 and D = 4.
    assert found.best_parameters(48.0) == pytest.approx(2.0, rel=1e-5)
    assert found.compute_exponent == pytest.approx(0.5, rel=1e-6)


def test_best_parameters_is_the_minimum_of_the_law_at_equal_compute() -> None:
    sizes = np.geomspace(1e4, 1e9, 20001)
    lowest = sizes[np.argmin(TRUE.loss(sizes, 1e15 / (6 * sizes)))]
    assert TRUE.best_parameters(1e15) == pytest.approx(lowest, rel=1e-3)


def test_recovers_the_law_from_losses_with_noise_and_an_outlier() -> None:
    N, D = design(13)
    losses = TRUE.loss(N, D) * np.exp(0.001 * np.random.default_rng(3).normal(size=N.size))
    found = fit(N, D, losses)
    assert found.alpha == pytest.approx(TRUE.alpha, abs=0.01)
    assert found.beta == pytest.approx(TRUE.beta, abs=0.04)
    assert pytest.approx(TRUE.E, abs=0.04) == found.E
    losses[7] *= 1.2  # a run that diverged
    other = fit(N, D, losses)
    assert other.alpha == pytest.approx(found.alpha, abs=0.01)
    squares = fit(N, D, losses, delta=10.0)  # least squares follows the outlier
    assert abs(squares.alpha - found.alpha) > 3 * abs(other.alpha - found.alpha)


def test_agrees_with_a_search_over_all_five_parameters() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    N, D = design()
    y = np.log(TRUE.loss(N, D)) + 0.002 * np.random.default_rng(5).normal(size=N.size)

    def residuals(p: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(p[0] + np.exp(p[1]) * N ** -p[3] + np.exp(p[2]) * D ** -p[4]) - y)

    start = [TRUE.E, np.log(TRUE.A), np.log(TRUE.B), TRUE.alpha, TRUE.beta]
    options = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 2000}
    best = optimize.least_squares(residuals, start, loss="huber", f_scale=DELTA, **options)
    found = fit_batch(N, D, np.exp(y)[None])
    assert found.objective[0] <= huber(residuals(best.x), DELTA).sum() * (1 + 1e-4)
    np.testing.assert_allclose(found.exponents[0], best.x[3:], atol=2e-3)


def test_no_exponents_nearby_are_better_if_residuals_are_large() -> None:
    """Residuals of 1.5% are far above delta, so the objective is a sum of absolute values with kinks."""
    N, D = design(5)
    losses = TRUE.loss(N, D) * np.exp(0.015 * np.random.default_rng(8).normal(size=N.size))
    found = fit_batch(N, D, losses[None])
    sizes = np.log(np.stack([N, D]))
    x, y = sizes - sizes.mean(axis=1, keepdims=True), np.log(losses)[None]
    offsets = np.linspace(-0.03, 0.03, 21)
    near = found.exponents + np.stack(np.meshgrid(offsets, offsets), axis=-1).reshape(-1, 2)
    _, objective = project(x, np.repeat(y, len(near), axis=0), np.maximum(near, 0.01), DELTA, 40)
    assert found.objective[0] <= objective.min() * (1 + 1e-6)


def test_no_coefficient_is_negative() -> None:
    N, D = design()
    losses = Law(0.0, 40.0, 120.0, 0.2, 0.3).loss(N, D) - 0.2  # E would be -0.2
    found = fit_batch(N, D, np.asarray(losses)[None])
    assert (found.coefficients >= 0).all()
    assert np.isfinite(found.exponents).all()


@pytest.mark.parametrize(
    ("N", "D", "losses"),
    [
        ([1, 2, 3], [1, 2, 3], [3, 2, 1]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6], [3, 2, 3, 2, 3, 2]),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [3, 2, 3, 2, 3, -2]),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [3, 2, 3, 2, 3, float("nan")]),
    ],
)
def test_runs_that_determine_no_law_are_an_error(N: list[int], D: list[int], losses: list[float]) -> None:
    with pytest.raises(DataError):
        fit(np.array(N, float), np.array(D, float), np.array(losses, float))
