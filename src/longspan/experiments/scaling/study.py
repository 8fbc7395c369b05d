"""A scaling study: the law of each group of runs with intervals, a prediction of its largest model, and the difference
between groups."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longspan.errors import ConfigError, DataError
from longspan.experiments.scaling.law import DELTA, PARAMETERS, Fit, Floats, Law, fit_batch
from longspan.experiments.scaling.points import Point

RESAMPLES, LEVEL = 1000, 0.95
COUNTS = ("non_embedding", "parameters")
"""How N is counted; the first is the default."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """The largest model of a group, predicted from the others."""

    name: str
    tokens: int
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative to the measured loss."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, eq=False)
class Study:
    """A group of runs and its law. `laws` are those of the resamples."""

    group: str
    points: tuple[Point, ...]
    count: str
    law: Law
    laws: tuple[Law, ...]
    spread: float
    """Root mean square of the residuals of the log loss."""
    prediction: Prediction | None

    def interval(self, name: str) -> Interval:
        """The 95% interval of a number of the law: E, A, B, alpha, beta or compute_exponent."""
        return interval([getattr(law, name) for law in self.laws])

    @property
    def facts(self) -> dict[str, Any]:
        names = ("E", "A", "B", "alpha", "beta", "compute_exponent")
        found = self.prediction
        return {
            "group": self.group,
            "runs": len(self.points),
            "count": self.count,
            "law": {name: getattr(self.law, name) for name in names},
            "intervals": {name: list(self.interval(name)) for name in names},
            "spread": self.spread,
            "prediction": None if found is None else asdict(found) | {"error": found.error},
        }


@dataclass(frozen=True)
class Difference:
    """A number of the second group's law minus that of the first, with its 95% interval."""

    name: str
    first: str
    second: str
    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Gap:
    """Losses of the second group minus those of the first, in bits, at equal parameters and tokens."""

    first: str
    second: str
    pairs: int
    median: float
    lower_quartile: float
    upper_quartile: float


def interval(values: Sequence[float]) -> Interval:
    low, high = np.quantile(np.asarray(values, np.float64), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def study(
    points: Sequence[Point], count: str = COUNTS[0], *, resamples: int = RESAMPLES, seed: int = 0, delta: float = DELTA
) -> Study:
    """The law of one group of runs. `count` names the field of a point that is N."""
    if count not in COUNTS:
        raise ConfigError(f"count={count!r} must be one of {', '.join(COUNTS)}")
    parameters, tokens, losses = _columns(points, count)
    law, laws, spread = bootstrap(parameters, tokens, losses, resamples, seed, delta)
    prediction = _predict(points, count, resamples, seed, delta)
    return Study(points[0].group, tuple(points), count, law, laws, spread, prediction)


def studies(points: Sequence[Point], count: str = COUNTS[0], **options: Any) -> list[Study]:
    """A study of each group, in order of first appearance."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    found = []
    for group, each in groups.items():
        try:
            found.append(study(each, count, **options))
        except DataError as error:
            raise DataError(f"{group}: {error}") from None
    return found


def differences(found: Sequence[Study]) -> list[Difference]:
    """How the exponents and E of two groups differ, for every pair. Resamples of different groups are independent."""
    result = []
    for first, second in itertools.combinations(found, 2):
        for name in ("alpha", "beta", "E"):
            # Shifted by one resample: groups of equal size are resampled with the same random numbers.
            pairs = zip(first.laws, second.laws[1:] + second.laws[:1], strict=True)
            low, high = interval([getattr(b, name) - getattr(a, name) for a, b in pairs])
            value = getattr(second.law, name) - getattr(first.law, name)
            result.append(Difference(name, first.group, second.group, value, low, high))
    return result


def gaps(points: Sequence[Point]) -> list[Gap]:
    """How the losses of two groups differ at equal parameters and tokens, for every pair of groups with such runs. No
    law is fitted. Several runs of the same size and group, such as seeds, are averaged."""
    groups: dict[str, dict[tuple[int, int], list[float]]] = {}
    for point in points:
        groups.setdefault(point.group, {}).setdefault((point.parameters, point.tokens), []).append(point.bits)
    result = []
    for (first, ours), (second, theirs) in itertools.combinations(groups.items(), 2):
        apart = [float(np.mean(theirs[size]) - np.mean(bits)) for size, bits in ours.items() if size in theirs]
        if apart:
            lower, median, upper = (float(each) for each in np.quantile(apart, [0.25, 0.5, 0.75]))
            result.append(Gap(first, second, len(apart), median, lower, upper))
    return result


def _columns(points: Sequence[Point], count: str) -> tuple[Floats, Floats, Floats]:
    rows = [(getattr(point, count), point.tokens, point.bits) for point in points]
    table = np.array(rows, np.float64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def bootstrap(
    parameters: Floats, tokens: Floats, losses: Floats, resamples: int, seed: int = 0, delta: float = DELTA
) -> tuple[Law, tuple[Law, ...], float]:
    """The law, the laws of resamples, and the spread of the residuals.

    Residuals of the log loss are resampled, not runs: the runs are a design with few sizes, and without one of them the
    exponents may be undetermined.
    """
    full = fit_batch(parameters, tokens, losses[None], delta)
    law = full.law()
    expected = np.log(law.loss(parameters, tokens))
    residuals = np.log(losses) - expected
    spread = float(np.sqrt(np.mean(residuals**2)))
    drawn = np.random.default_rng(seed).choice(_typical(residuals), (resamples, len(losses)))
    resampled: Fit = fit_batch(parameters, tokens, np.exp(expected + drawn), delta, start=full.exponents[0])
    return law, tuple(resampled.law(row) for row in range(resamples)), spread


def _typical(residuals: Floats) -> Floats:
    """Residuals as large as those of new runs would be.

    A fit with a Huber loss passes nearly through as many runs as it has parameters. Their residuals say nothing about
    the noise, so they are left out. If few runs would be left, all residuals are enlarged instead. They are centred at
    their median, where that loss is lowest: a single run far off would shift their mean, and with it every resample.
    """
    centred = residuals - np.median(residuals)
    if len(residuals) < 3 * PARAMETERS:
        return np.asarray(centred * np.sqrt(len(residuals) / (len(residuals) - PARAMETERS)))
    return np.asarray(centred[np.argsort(np.abs(centred))[PARAMETERS:]])


def _predict(points: Sequence[Point], count: str, resamples: int, seed: int, delta: float) -> Prediction | None:
    """Fit all runs but those of the largest model and predict its longest run; None if the others are too few."""
    largest = max(getattr(point, count) for point in points)
    smaller = [point for point in points if getattr(point, count) < largest]
    target = max((point for point in points if getattr(point, count) == largest), key=lambda point: point.tokens)
    try:
        law, laws, _ = bootstrap(*_columns(smaller, count), resamples, seed, delta)
    except DataError:
        return None
    at = (getattr(target, count), target.tokens)
    low, high = interval([float(one.loss(*at)) for one in laws])
    return Prediction(target.name, target.tokens, target.bits, float(law.loss(*at)), low, high)
