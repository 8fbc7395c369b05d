"""Synthetic sources: samples match the definition, and entropy rates match the samples."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from longspan.data.synthetic import SOURCES, AssociativeRecall, Copy, ExactLag, MarkedLag, SyntheticSource
from longspan.errors import ConfigError

SMALL: dict[str, SyntheticSource] = {
    "marked-lag": MarkedLag(5, symbols=4),
    "exact-lag": ExactLag(5, symbols=4),
    "copy": Copy(5, symbols=4),
    "associative-recall": AssociativeRecall(3, keys=5, values=4),
}


@pytest.mark.parametrize("name", SOURCES)
def test_samples_cover_the_vocabulary_and_depend_on_the_seed(name: str) -> None:
    source = SMALL[name]
    ids = source.sample(1003, seed=3)
    assert len(ids) == 1003
    assert set(ids.tolist()) == set(range(source.vocabulary))
    np.testing.assert_array_equal(ids, source.sample(1003, seed=3))
    assert (ids != source.sample(1003, seed=4)).any()
    np.testing.assert_array_equal(source.targets(500), source.targets(1003)[: len(source.targets(500))])


def test_marked_lag() -> None:
    source = MarkedLag(5, symbols=4)
    ids = source.sample(7 * 3000).reshape(-1, 7)
    lags = ids[:, 5] - 4 + 1
    assert (ids[np.arange(len(ids)), 5 - lags] == ids[:, 6]).all()
    assert np.allclose(np.bincount(lags)[1:] / len(ids), 1 / 5, atol=0.03)
    assert (source.targets(21) == [6, 13, 20]).all()


def test_exact_lag() -> None:
    ids = ExactLag(5, symbols=4, noise=0.2).sample(20_000)
    assert np.mean(ids[5:] == ids[:-5]) == pytest.approx(0.8 + 0.05, abs=0.01)
    assert np.mean(ids[4:] == ids[:-4]) == pytest.approx(0.25, abs=0.02)


def test_copy() -> None:
    ids = Copy(5, symbols=4).sample(1200)
    targets = Copy(5, symbols=4).targets(1200)
    assert (ids[targets] == ids[targets - 6]).all()
    assert len(targets) == 500


def test_associative_recall() -> None:
    source = AssociativeRecall(3, keys=5, values=4)
    for block in source.sample(900).reshape(-1, 9):
        pairs = dict(zip(block[0:6:2].tolist(), block[1:6:2].tolist(), strict=True))
        assert len(pairs) == 3
        assert block[6] == 9
        assert pairs[block[7]] == block[8]


@pytest.mark.parametrize("name", SOURCES)
def test_with_full_context_the_ideal_loss_is_the_entropy_of_the_targets(name: str) -> None:
    source = SMALL[name]
    ids, targets = source.sample(20_000), source.targets(20_000)
    expected = source.entropy_rate if name == "exact-lag" else 0.0
    assert source.ideal_losses(ids, targets, 20).mean() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", SOURCES)
def test_more_context_never_hurts(name: str) -> None:
    source = SMALL[name]
    ids, targets = source.sample(40_000), source.targets(40_000)
    means = [source.ideal_losses(ids, targets, c).mean() for c in range(20)]
    assert means[0] == pytest.approx(math.log(4), abs=0.01)
    assert all(b <= a + 0.01 for a, b in pairwise(means))


@pytest.mark.parametrize("context", [2, 3, 4, 5, 6, 7, 8])
def test_the_ideal_loss_of_recall_matches_counts(context: int) -> None:
    """The conditional entropy of a target given its context, estimated from many blocks."""
    source = AssociativeRecall(2, keys=2, values=2)
    ids, targets = source.sample(7 * 60_000), source.targets(7 * 60_000)
    targets = targets[1:]
    windows = [tuple(ids[t - min(context, 6) : t]) for t in targets]
    seen = Counter(windows)
    followed = Counter((*window, ids[t]) for window, t in zip(windows, targets, strict=True))
    counted = -sum(n * math.log(n / seen[key[:-1]]) for key, n in followed.items()) / len(targets)
    assert source.ideal_losses(ids, targets, context).mean() == pytest.approx(counted, abs=0.01)


@pytest.mark.parametrize("name", SOURCES)
def test_the_entropy_rate_matches_counted_blocks(name: str) -> None:
    """Blocks are independent, so the rate is the entropy of a block divided by its length."""
    tiny: dict[str, tuple[SyntheticSource, int]] = {
        "marked-lag": (MarkedLag(3, symbols=2), 5),
        "exact-lag": (ExactLag(1, symbols=3, noise=0.5), 1),
        "copy": (Copy(3, symbols=2), 8),
        "associative-recall": (AssociativeRecall(2, keys=3, values=2), 7),
    }
    source, block = tiny[name]
    ids = source.sample(block * 40_000)
    if name == "exact-lag":
        pairs, singles = Counter(zip(ids[1:], ids[:-1], strict=True)), Counter(ids[:-1].tolist())
        counted = -sum(n * math.log(n / singles[key[1]]) for key, n in pairs.items()) / (len(ids) - 1)
    else:
        counts = Counter(map(tuple, ids.reshape(-1, block).tolist()))
        counted = -sum(n * math.log(n / 40_000) for n in counts.values()) / 40_000 / block
    assert source.entropy_rate == pytest.approx(counted, rel=0.01)


def test_invalid_sources_are_refused() -> None:
    for make in (
        lambda: MarkedLag(0),
        lambda: MarkedLag(3, symbols=1),
        lambda: ExactLag(3, noise=1.5),
        lambda: Copy(0),
        lambda: AssociativeRecall(5, keys=4),
        lambda: AssociativeRecall(0),
    ):
        with pytest.raises(ConfigError):
            make()
