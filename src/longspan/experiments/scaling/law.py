"""L(N, D) = E + A / N^alpha + B / D^beta, fitted to losses (Hoffmann et al. 2022, approach 3).

The objective is the sum of Huber(log predicted - log measured). It is minimised by variable projection (Golub & Pereyra
1973): for given exponents the law is linear in E, A and B, so these are solved for, and only the two exponents are
searched. A search over all five is what made the published fit of Hoffmann et al. wrong (Besiroglu et al. 2024). All
functions work on batches of losses, one law per row, so that a bootstrap is one call.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError

Floats = NDArray[np.float64]
DELTA = 1e-3
"""Residuals of the log loss above this count linearly: the value of Hoffmann et al."""
PARAMETERS = 5
EXPONENTS = (0.01, 3.0)
"""The range that is searched for both exponents."""
_GRID, _STARTS = 15, 3
_ITERATIONS, _REWEIGHTINGS, _FINE = 40, 8, 40
_SUBSETS = ((1, 2), (0, 1), (0, 2), (0,))  # of E, A and B, if one of them would be negative


@dataclass(frozen=True)
class Law:
    """The loss of a model with N parameters after D tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """Of numbers or arrays."""
        return self.E + self.A * np.power(parameters, -self.alpha) + self.B * np.power(tokens, -self.beta)

    @property
    def compute_exponent(self) -> float:
        """a of N_best ~ C^a, for training FLOPs C = 6 N D."""
        return self.beta / (self.alpha + self.beta)

    def best_parameters(self, flops: float) -> float:
        """The N with the lowest loss for C = 6 N D FLOPs (Hoffmann et al. 2022, eq. 4)."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return float(scale * (flops / 6) ** self.compute_exponent)


@dataclass(frozen=True)
class Fit:
    """Laws of a batch of losses over one set of runs. Sizes are relative to `scale`, which keeps numbers near 1."""

    coefficients: Floats
    """[batch, 3]: E, and the other two terms at the scale."""
    exponents: Floats
    """[batch, 2]"""
    scale: Floats
    """[2]: the geometric means of N and D."""
    objective: Floats
    """[batch]"""

    def law(self, row: int = 0) -> Law:
        (E, a, b), (alpha, beta) = self.coefficients[row], self.exponents[row]
        A, B = a * self.scale[0] ** alpha, b * self.scale[1] ** beta
        return Law(float(E), float(A), float(B), float(alpha), float(beta))


def fit(parameters: Floats, tokens: Floats, losses: Floats, delta: float = DELTA) -> Law:
    """The law of some runs: N, D and the loss of each."""
    return fit_batch(parameters, tokens, np.asarray(losses, np.float64)[None], delta).law()


def fit_batch(
    parameters: Floats, tokens: Floats, losses: Floats, delta: float = DELTA, start: Floats | None = None
) -> Fit:
    """A law for each row of losses [batch, runs]. The search starts at the exponents `start`, default: at the best
    points of a grid, which are found with the first row."""
    sizes = np.log(np.stack([parameters, tokens]).astype(np.float64))
    _check(sizes, losses)
    scale = sizes.mean(axis=1, keepdims=True)
    x, y = sizes - scale, np.log(losses)
    starts = _grid_starts(x, y[:1], delta) if start is None else start[None]
    found: tuple[Floats, Floats, Floats] | None = None
    for one in starts:
        exponents = np.broadcast_to(one, (len(y), 2)).copy()
        other = _search(x, y, exponents, delta)
        if found is None:
            found = other
            continue
        better = other[2] < found[2]
        found = tuple(
            np.where(better[(...,) + (None,) * (a.ndim - 1)], b, a) for a, b in zip(found, other, strict=True)
        )  # type: ignore[assignment]
    assert found is not None
    coefficients, exponents, objective = found if len(y) > 1 else _polish(x, y, *found, delta)
    return Fit(coefficients, exponents, np.exp(scale[:, 0]), objective)


def _check(sizes: Floats, losses: Floats) -> None:
    runs = losses.shape[1]
    if runs <= PARAMETERS:
        raise DataError(
            f"a scaling law with {PARAMETERS} parameters needs at least {PARAMETERS + 1} runs, not {runs}; add runs"
        )
    if not np.isfinite(losses).all() or (losses <= 0).any():
        raise DataError("a loss is not a number above 0; remove that run")
    for name, values in zip(("parameters", "tokens"), sizes, strict=True):
        if len(np.unique(values)) < 3:
            raise DataError(
                f"the runs have {len(np.unique(values))} different numbers of {name}, but at least 3 are needed; "
                "add runs"
            )


def huber(residuals: Floats, delta: float) -> Floats:
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta))


def _columns(x: Floats, exponents: Floats) -> Floats:
    """[batch, runs, 3]: what E and the two terms are multiplied by."""
    powers = np.exp(-exponents[..., None] * x)
    return np.stack([np.ones_like(powers[:, 0]), powers[:, 0], powers[:, 1]], axis=-1)


def project(
    x: Floats, y: Floats, exponents: Floats, delta: float, reweightings: int = _REWEIGHTINGS
) -> tuple[Floats, Floats]:
    """The best E, A and B, none negative, for given exponents, and the objective there.

    log(X c) - y is linearised at the last c and its squares are weighted so that they add up to the Huber loss. The
    first pass is least squares in the relative error, which is the same to first order.
    """
    columns = _columns(x, exponents)
    predicted, weights = np.exp(y), np.ones_like(y)
    coefficients, objective = np.zeros((len(y), 3)), np.full(len(y), np.inf)
    for _ in range(reweightings):
        target = 1 - (np.log(predicted) - y)
        scaled = columns / predicted[..., None]
        new = _non_negative(scaled, target, weights)
        fitted = (columns @ new[..., None])[..., 0]
        residuals = np.log(np.maximum(fitted, 1e-300)) - y
        value = huber(residuals, delta).sum(axis=1)
        better = value < objective
        done = objective - value <= 1e-10 * value
        coefficients[better], objective[better] = new[better], value[better]
        if done.all():
            break
        predicted = np.maximum(fitted, 1e-300)
        weights = delta / np.maximum(np.abs(residuals), delta)
    return coefficients, objective


def _non_negative(columns: Floats, target: Floats, weights: Floats) -> Floats:
    """Weighted least squares with coefficients that are not negative. Where one would be, subsets are tried."""
    root = np.sqrt(weights)
    left, right = columns * root[..., None], target * root
    gram, moments = left.swapaxes(1, 2) @ left, (left.swapaxes(1, 2) @ right[..., None])[..., 0]
    best = _solved(gram, moments)
    rows = np.flatnonzero((best < 0).any(axis=1))
    if not rows.size:
        return best
    gram, moments, left, right = gram[rows], moments[rows], left[rows], right[rows]
    chosen, lowest = np.zeros(moments.shape), np.full(len(rows), np.inf)
    for subset in _SUBSETS:
        some = list(subset)
        solved = _solved(gram[:, some][:, :, some], moments[:, some])
        found = np.zeros(moments.shape)
        found[:, some] = solved
        value = ((left @ found[..., None])[..., 0] - right) ** 2
        value = np.where((solved >= 0).all(axis=1), value.sum(axis=1), np.inf)
        better = value < lowest
        chosen[better], lowest[better] = found[better], value[better]
    best[rows] = chosen
    return best


def _solved(gram: Floats, moments: Floats) -> Floats:
    """Solutions of normal equations, with a little damping for columns that are nearly equal."""
    ridge = 1e-12 * np.trace(gram, axis1=1, axis2=2)[:, None, None] * np.eye(gram.shape[1])
    solution: Floats = np.linalg.solve(gram + ridge, moments[..., None])[..., 0]
    return solution


def _grid_starts(x: Floats, y: Floats, delta: float) -> Floats:
    """The best exponents of a grid, at most `_STARTS`."""
    line = np.geomspace(*EXPONENTS, _GRID)
    grid = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(-1, 2)
    _, objective = project(x, np.broadcast_to(y, (len(grid), y.shape[1])).copy(), grid, delta)
    order: Floats = grid[np.argsort(objective, kind="stable")[:_STARTS]]
    return order


def _search(x: Floats, y: Floats, exponents: Floats, delta: float) -> tuple[Floats, Floats, Floats]:
    """Gauss-Newton steps of the exponents, damped as by Levenberg and Marquardt, each row by itself.

    The derivative of the projected residuals is that of the law without the part that E, A and B can absorb (Kaufman
    1975).
    """
    coefficients, objective = project(x, y, exponents, delta)
    damping = np.full(len(y), 1e-3)
    active = np.arange(len(y))  # rows that still improve
    for _ in range(_ITERATIONS):
        here = exponents[active]
        step = _step(x, y[active], here, coefficients[active], damping[active], delta)
        trial = np.clip(here + np.clip(step, -0.5, 0.5), *EXPONENTS)
        tried, value = project(x, y[active], trial, delta)
        gain = objective[active] - value
        better, rows = gain > 0, active[gain > 0]
        exponents[rows], coefficients[rows], objective[rows] = trial[better], tried[better], value[better]
        damping[active] = np.where(better, damping[active] / 5, damping[active] * 5)
        done = np.where(better, gain <= 1e-9 * value, damping[active] > 1e3) | (np.abs(trial - here) < 1e-7).all(axis=1)
        active = active[~done]
        if not active.size:
            break
    return coefficients, exponents, objective


def _polish(
    x: Floats, y: Floats, coefficients: Floats, exponents: Floats, objective: Floats, delta: float
) -> tuple[Floats, Floats, Floats]:
    """A pattern search from the exponents of one law. Where residuals are much larger than delta the objective has
    kinks, and steps by derivatives stop early; in a bootstrap that is small against the spread."""
    around = np.array([(i, k) for i in (-1, 0, 1) for k in (-1, 0, 1)], np.float64)
    size, many = 0.05, np.repeat(y, len(around), axis=0)
    for _ in range(400):
        trials = np.clip(exponents + size * around, *EXPONENTS)
        tried, values = project(x, many, trials, delta, _FINE)
        best = [int(values.argmin())]
        if values[best[0]] < objective[0] * (1 - 1e-8):
            coefficients, exponents, objective = tried[best], trials[best], values[best]
        elif size < 2e-4:
            break
        else:
            size /= 2
    return coefficients, exponents, objective


def _step(x: Floats, y: Floats, exponents: Floats, coefficients: Floats, damping: Floats, delta: float) -> Floats:
    columns = _columns(x, exponents)
    fitted = np.maximum((columns @ coefficients[..., None])[..., 0], 1e-300)
    residuals = np.log(fitted) - y
    root = np.sqrt(delta / np.maximum(np.abs(residuals), delta))
    # A coefficient at 0 absorbs nothing: it cannot become negative.
    linear = columns * (root / fitted)[..., None] * (coefficients > 0)[:, None]
    slopes = -x.T * coefficients[:, None, 1:] * columns[..., 1:] * (root / fitted)[..., None]
    gram = linear.swapaxes(1, 2) @ linear
    gram = gram + 1e-12 * np.trace(gram, axis1=1, axis2=2)[:, None, None] * np.eye(3)
    slopes = slopes - linear @ np.linalg.solve(gram, linear.swapaxes(1, 2) @ slopes)
    normal = slopes.swapaxes(1, 2) @ slopes
    size = np.trace(normal, axis1=1, axis2=2)[:, None, None]
    normal = normal + (damping[:, None, None] * size + 1e-15) * np.eye(2)
    gradient = slopes.swapaxes(1, 2) @ (root * residuals)[..., None]
    step: Floats = -np.linalg.solve(normal, gradient)[..., 0]
    return step
