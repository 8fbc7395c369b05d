"""Relative effective context length (Dai et al. 2019, section 4.3 and appendix C). docs/recl.md

For a group of models i, lengths of context c < c' and targets t:

    l_i(c, t) = -log P_i(x_t | the c tokens before t)
    b(c, t)   = min over i of l_i(c, t)
    T         = the share r of targets with the largest b(c, t), chosen again for each c
    f_i(c, c') = mean over T of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

Starting at the first c, with c' the next: if g_i < threshold then RECL_i = c, else c <- c' and repeat. The paper
specifies neither the step nor the first c. ECL is that of Khandelwal et al. 2018, with the longest measured context in
place of an unlimited one.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.errors import ConfigError
from longspan.scoring.loss_table import LossTable

Floats = NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 0.95
_ROWS = 100  # resamples per batch, which bounds the memory: arrays are [_ROWS, targets]


@dataclass(frozen=True)
class Length:
    """A length of context in tokens, with its bootstrap interval."""

    tokens: int
    low: int
    high: int
    bounded: bool
    """The gain continued up to the last context, so the length may be larger."""


@dataclass(frozen=True)
class LengthDifference:
    """RECL of one model minus that of another, with its bootstrap interval."""

    first: str
    second: str
    tokens: int
    low: int
    high: int
    longer: float
    """Share of the resamples in which the first is longer; those with equal lengths count half."""


def best_losses(losses: Floats) -> Floats:
    """b[k, t] of losses[i, k, t]: the lowest loss of any model of the group on target t with the k-th context."""
    return losses.min(axis=0)


def hard_targets(best: Floats, share: float) -> NDArray[np.intp]:
    """T of b[t] at one context: the max(1, round(r N)) targets with the largest b; earlier ones first among ties."""
    return np.argsort(-best, kind="stable")[: _hard_count(len(best), share)]


def relative_loss(losses: Floats, best: Floats, hard: NDArray[np.intp]) -> float:
    """f_i(c, c') of a model's losses[t] at c' and the group's best[t] at c."""
    return float(np.minimum(best, losses)[hard].mean())


def gain(before: float, after: float) -> float:
    """g of f(c, c) and f(c, c')."""
    return float(-np.expm1(after - before))


def gains(losses: Floats, share: float) -> Floats:
    """g_i(c, c') of losses[i, k, t] as [i, k], for each context c but the last; c' is the next one."""
    check_share(share)
    models, contexts, _ = losses.shape
    best, found = best_losses(losses), np.empty((models, contexts - 1))
    for k in range(contexts - 1):
        hard = hard_targets(best[k], share)
        for i in range(models):
            before = relative_loss(losses[i, k], best[k], hard)
            found[i, k] = gain(before, relative_loss(losses[i, k + 1], best[k], hard))
    return found


def recl(table: LossTable, share: float, threshold: float = 0.01, *, seed: int = 0) -> dict[str, Length]:
    """RECL of every model of the group, on the share r = `share` of hardest targets."""
    return _lengths(table, *_recl_stops(table, share, threshold, seed))


def recl_differences(
    table: LossTable, share: float, threshold: float = 0.01, *, seed: int = 0
) -> list[LengthDifference]:
    """How the RECL of every pair of models differs, in the order of their names.

    All models of a resample have the same targets, so a difference is often clearer than the intervals of two lengths.
    """
    stops, resampled = _recl_stops(table, share, threshold, seed)
    contexts = np.array(table.contexts)
    found = []
    for i, k in itertools.combinations(sorted(range(len(table.names)), key=table.names.__getitem__), 2):
        apart = contexts[resampled[:, i]] - contexts[resampled[:, k]]
        low = np.quantile(apart, (1 - LEVEL) / 2, method="lower")
        high = np.quantile(apart, (1 + LEVEL) / 2, method="higher")
        tokens = int(contexts[stops[i]] - contexts[stops[k]])
        longer = float((apart > 0).mean() + (apart == 0).mean() / 2)
        ends = (min(tokens, int(low)), max(tokens, int(high)))
        found.append(LengthDifference(table.names[i], table.names[k], tokens, *ends, longer))
    return found


def _recl_stops(
    table: LossTable, share: float, threshold: float, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices into the contexts at which RECL stops: [i] for all targets, and [s, i] for each resample."""
    check_threshold(threshold)
    stops = _first_below(gains(table.losses, share), threshold)
    losses = _canonical(table)
    blocks = [
        _first_below(resampled_gains(losses, share, counts), threshold) for counts in _resamples(table.targets, seed)
    ]
    return stops, np.concatenate(blocks)


def ecl(table: LossTable, threshold: float = 0.01, *, seed: int = 0) -> dict[str, Length]:
    """ECL of every model: the shortest context whose perplexity is within the threshold of the longest context's."""
    check_threshold(threshold)
    stops = _first_within(table.losses.mean(axis=2), threshold)
    losses = _canonical(table)
    blocks = [
        _first_within(np.tensordot(counts, losses, axes=(1, 2)) / table.targets, threshold)
        for counts in _resamples(table.targets, seed)
    ]
    return _lengths(table, stops, np.concatenate(blocks))


def chance_gains(table: LossTable, found: Iterable[Mapping[str, Length]]) -> list[str]:
    """A note for every model whose RECL is beyond the context with its lowest perplexity.

    f takes the better of two losses for each target, so random differences look like a gain: docs/recl.md.
    """
    lengths = list(found)
    longest = {name: max(one[name].tokens for one in lengths) for name in table.names}
    best = dict(zip(table.names, table.losses.mean(axis=2).argmin(axis=1), strict=True))
    return [
        f"{name} has its lowest perplexity with {table.contexts[best[name]]} tokens of context; its RECL beyond "
        "that may be chance"
        for name in table.names
        if longest[name] > table.contexts[best[name]]
    ]


def resampled_gains(losses: Floats, share: float, counts: Floats) -> Floats:
    """g_i(c, c') as [resample, i, k], where resample s contains target t counts[s, t] times.

    Copies of a target are adjacent in the order of b, so a cumulative sum of the counts gives the hardest targets.
    """
    models, contexts, targets = losses.shape
    best, hard = best_losses(losses), _hard_count(targets, share)
    found = np.empty((len(counts), models, contexts - 1))
    for k in range(contexts - 1):
        order = np.argsort(-best[k], kind="stable")
        before, after = best[k, order], np.minimum(best[k], losses[:, k + 1])[:, order]
        copies = counts[:, order]
        taken = np.clip(hard - (np.cumsum(copies, axis=1) - copies), 0, copies)
        found[:, :, k] = -np.expm1((taken @ after.T - (taken @ before)[:, None]) / hard)
    return found


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigError(f"share={share} must be above 0 and at most 1: it is a share of the targets")


def check_threshold(threshold: float) -> None:
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold={threshold} must be between 0 and 1; 0.01 is one percent of perplexity")


def _hard_count(targets: int, share: float) -> int:
    check_share(share)
    return max(1, round(share * targets))


def _first_below(found: Floats, threshold: float) -> NDArray[np.intp]:
    """Along the last axis, the first index whose gain is below the threshold; one past the end if there is none."""
    below = np.concatenate([found < threshold, np.ones((*found.shape[:-1], 1), bool)], axis=-1)
    return below.argmax(axis=-1)


def _first_within(nats: Floats, threshold: float) -> NDArray[np.intp]:
    """Along the last axis, the first mean loss whose perplexity is at most (1 + threshold) times that of the last."""
    return (nats <= nats[..., -1:] + np.log1p(threshold)).argmax(axis=-1)


def _canonical(table: LossTable) -> Floats:
    """Losses with the targets sorted, so that intervals depend neither on the order of targets nor of models."""
    by_name = table.losses[np.argsort(table.names)]
    return table.losses[:, :, np.lexsort(by_name.reshape(-1, table.targets))]


def _resamples(targets: int, seed: int) -> Iterator[Floats]:
    """Bootstrap counts per target, RESAMPLES rows in batches."""
    random, even = np.random.default_rng(seed), np.full(targets, 1 / targets)
    for begin in range(0, RESAMPLES, _ROWS):
        yield random.multinomial(targets, even, min(_ROWS, RESAMPLES - begin)).astype(np.float64)


def _lengths(table: LossTable, stops: NDArray[np.intp], resampled: NDArray[np.intp]) -> dict[str, Length]:
    """Lengths from indices into the contexts: stops[i] and resampled[s, i]."""
    # Quantiles are lengths that occurred, not values between two of them; the interval always contains the length.
    low = np.minimum(stops, np.quantile(resampled, (1 - LEVEL) / 2, axis=0, method="lower"))
    high = np.maximum(stops, np.quantile(resampled, (1 + LEVEL) / 2, axis=0, method="higher"))
    contexts, last = table.contexts, len(table.contexts) - 1
    return {
        name: Length(contexts[stop], contexts[int(low[i])], contexts[int(high[i])], bool(stop == last))
        for i, (name, stop) in enumerate(zip(table.names, stops, strict=True))
    }
