"""Relative effective context length (Dai et al. 2019, section 4.3 and appendix C). docs/recl.md

For a group of models i, lengths of context c < c' and targets t:

    l_i(c, t) = -log P_i(x_t | the c tokens before t)
    b(c, t)   = min over i of l_i(c, t)
    T         = the share r of targets with the largest b(c, t), chosen anew for each c
    f_i(c, c') = mean over T of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

From the first c, with c' the next: g_i < threshold gives RECL_i = c, else c <- c' and again. The paper names neither
the step nor the first c. ECL is that of Khandelwal et al. 2018, with the longest context measured for all there is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.errors import ConfigError
from longspan.evaluation.loss_table import LossTable

Floats = NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 0.95
_ROWS = 100  # resamples at once: tables of [_ROWS, targets] are held


@dataclass(frozen=True)
class Length:
    """A length of context in tokens, with the bootstrap interval of it; `bounded` where the contexts ended first."""

    tokens: int
    low: int
    high: int
    bounded: bool


def best_losses(losses: Floats) -> Floats:
    """b[k, t] of losses[i, k, t]: the least any model of the group loses on t with the k-th context."""
    return losses.min(axis=0)


def hard_targets(best: Floats, share: float) -> NDArray[np.intp]:
    """T of b[t] at one context: the max(1, round(r N)) targets with the largest, earlier ones first among equals."""
    return np.argsort(-best, kind="stable")[: _hard_count(len(best), share)]


def relative_loss(losses: Floats, best: Floats, hard: NDArray[np.intp]) -> float:
    """f_i(c, c') of a model's losses[t] at c' and the group's best[t] at c."""
    return float(np.minimum(best, losses)[hard].mean())


def gain(before: float, after: float) -> float:
    """g of f(c, c) and f(c, c')."""
    return float(-np.expm1(after - before))


def gains(losses: Floats, share: float) -> Floats:
    """g_i(c, c') of losses[i, k, t] for each context c but the last and the next one, as [i, k]."""
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
    """RECL of every model of the group at the share r = `share` of the hardest targets."""
    check_threshold(threshold)
    stops = _walk(gains(table.losses, share), threshold)
    losses = _canonical(table)
    blocks = [_walk(resampled_gains(losses, share, counts), threshold) for counts in _resamples(table.targets, seed)]
    return _lengths(table, stops, np.concatenate(blocks))


def ecl(table: LossTable, threshold: float = 0.01, *, seed: int = 0) -> dict[str, Length]:
    """ECL of every model: the shortest context whose perplexity is within the threshold of the longest one's."""
    check_threshold(threshold)
    stops = _within(table.losses.mean(axis=2), threshold)
    losses = _canonical(table)
    blocks = [
        _within(np.tensordot(counts, losses, axes=(1, 2)) / table.targets, threshold)
        for counts in _resamples(table.targets, seed)
    ]
    return _lengths(table, stops, np.concatenate(blocks))


def chance_gains(table: LossTable, found: Iterable[Mapping[str, Length]]) -> list[str]:
    """A sentence for every model whose RECL goes on where its perplexity no longer falls.

    f takes the better of two losses for each target, so losses that merely differ look like a gain: docs/recl.md.
    """
    lengths = list(found)
    longest = {name: max(one[name].tokens for one in lengths) for name in table.names}
    best = dict(zip(table.names, table.losses.mean(axis=2).argmin(axis=1), strict=True))
    return [
        f"{name} predicts best with {table.contexts[best[name]]} tokens of context; beyond that its RECL counts "
        "differences that go both ways"
        for name in table.names
        if longest[name] > table.contexts[best[name]]
    ]


def resampled_gains(losses: Floats, share: float, counts: Floats) -> Floats:
    """g_i(c, c') as [resample, i, k], where resample s holds target t counts[s, t] times.

    Copies of a target stand side by side in the order of b, so the hardest ones are a running sum of the counts.
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
        raise ConfigError(f"r {share} is no share of the targets; it must lie above 0 and at most at 1")


def check_threshold(threshold: float) -> None:
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold {threshold} must lie between 0 and 1; 0.01 is one percent of perplexity")


def _hard_count(targets: int, share: float) -> int:
    check_share(share)
    return max(1, round(share * targets))


def _walk(found: Floats, threshold: float) -> NDArray[np.intp]:
    """Along the last axis, the first place whose gain is below the threshold; one past the end where none is."""
    below = np.concatenate([found < threshold, np.ones((*found.shape[:-1], 1), bool)], axis=-1)
    return below.argmax(axis=-1)


def _within(nats: Floats, threshold: float) -> NDArray[np.intp]:
    """Along the last axis, the first mean loss whose perplexity is at most (1 + threshold) times that of the last."""
    return (nats <= nats[..., -1:] + np.log1p(threshold)).argmax(axis=-1)


def _canonical(table: LossTable) -> Floats:
    """Losses with the targets in an order that hangs on neither theirs nor the models', so that intervals do not."""
    by_name = table.losses[np.argsort(table.names)]
    return table.losses[:, :, np.lexsort(by_name.reshape(-1, table.targets))]


def _resamples(targets: int, seed: int) -> Iterator[Floats]:
    """How often each target is drawn, RESAMPLES times, some rows at a time."""
    random, even = np.random.default_rng(seed), np.full(targets, 1 / targets)
    for begin in range(0, RESAMPLES, _ROWS):
        yield random.multinomial(targets, even, min(_ROWS, RESAMPLES - begin)).astype(np.float64)


def _lengths(table: LossTable, stops: NDArray[np.intp], resampled: NDArray[np.intp]) -> dict[str, Length]:
    """Places among the contexts as lengths; stops[i], resampled[s, i]."""
    # Quantiles that are lengths which did occur, not points between two of them; the length itself is always held.
    low = np.minimum(stops, np.quantile(resampled, (1 - LEVEL) / 2, axis=0, method="lower"))
    high = np.maximum(stops, np.quantile(resampled, (1 + LEVEL) / 2, axis=0, method="higher"))
    contexts, last = table.contexts, len(table.contexts) - 1
    return {
        name: Length(contexts[stop], contexts[int(low[i])], contexts[int(high[i])], bool(stop == last))
        for i, (name, stop) in enumerate(zip(table.names, stops, strict=True))
    }
