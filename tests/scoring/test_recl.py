"""RECL: examples computed by hand, invariances, and sources with a known answer."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data.synthetic import AssociativeRecall, Copy, ExactLag, MarkedLag, SyntheticSource
from longspan.errors import ConfigError, DataError, LongspanError
from longspan.scoring import recl as measures
from longspan.scoring.loss_table import LossTable, load_table
from longspan.scoring.recl import (
    best_losses,
    chance_gains,
    ecl,
    gain,
    gains,
    hard_targets,
    recl,
    recl_differences,
    relative_loss,
    resampled_gains,
)

CONTEXTS = (10, 20, 30, 40)
NAMES = ("far", "middle", "near")
# Rows are contexts, columns the ten targets.
FAR = [
    [4.0, 3.0, 2.0, 2.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    [3.0, 3.0, 2.0, 2.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    [1.0, 2.0, 2.0, 2.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    [1.0, 1.0, 2.0, 2.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
]
MIDDLE = [
    [4.0, 3.0, 3.0, 2.2, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0],
    [3.5, 3.0, 1.0, 2.2, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0],
    [3.5, 3.0, 1.0, 2.2, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0],
    [3.5, 3.0, 1.0, 2.2, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0],
]
NEAR = [
    [5.0, 2.5, 2.0, 2.2, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0],
    [5.0, 2.5, 2.0, 2.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    [5.0, 2.5, 2.0, 2.2, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
    [5.0, 2.5, 2.0, 2.2, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
]
LOSSES = np.array([FAR, MIDDLE, NEAR])
TABLE = LossTable(NAMES, CONTEXTS, LOSSES)


def lengths(table: LossTable, share: float, threshold: float = 0.01) -> dict[str, int]:
    return {name: length.tokens for name, length in recl(table, share, threshold).items()}


def test_recl_of_an_example_by_hand() -> None:
    best = best_losses(LOSSES)
    assert best.tolist() == [
        [4.0, 2.5, 2.0, 2.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [3.0, 2.5, 1.0, 2.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [1.0, 2.0, 1.0, 2.2, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 2.2, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
    ]
    hard = [hard_targets(best[k], 0.2) for k in range(3)]
    assert [chosen.tolist() for chosen in hard] == [[0, 1], [0, 1], [3, 1]]
    # f(c, c) and f(c, c') for the three steps of each model.
    expected_f = {
        "far": [(3.25, 2.75), (2.75, 1.5), (2.1, 1.6)],
        "middle": [(3.25, 3.0), (2.75, 2.75), (2.1, 2.1)],
        "near": [(3.25, 3.25), (2.75, 2.75), (2.1, 2.1)],
    }
    drop = {"far": [0.5, 1.25, 0.5], "middle": [0.25, 0.0, 0.0], "near": [0.0, 0.0, 0.0]}
    found = gains(LOSSES, 0.2)
    for i, name in enumerate(NAMES):
        for k in range(3):
            before = relative_loss(LOSSES[i, k], best[k], hard[k])
            after = relative_loss(LOSSES[i, k + 1], best[k], hard[k])
            assert (before, after) == pytest.approx(expected_f[name][k])
            by_hand = (math.exp(before) - math.exp(after)) / math.exp(before)
            assert gain(before, after) == pytest.approx(by_hand)
            assert by_hand == pytest.approx(1 - math.exp(-drop[name][k]))
            assert found[i, k] == pytest.approx(by_hand)
    measured = recl(TABLE, 0.2)
    assert {name: length.tokens for name, length in measured.items()} == {"far": 40, "middle": 20, "near": 10}
    assert [name for name, length in measured.items() if length.bounded] == ["far"]


def test_ecl_of_an_example_by_hand() -> None:
    """Mean losses: far 1.72 1.62 1.32 1.22, middle 1.92 1.67 1.67 1.67, near 1.97 1.77 1.72 1.72."""
    assert {name: length.tokens for name, length in ecl(TABLE).items()} == {"far": 40, "middle": 20, "near": 30}
    assert ecl(TABLE, 0.06)["near"].tokens == 20  # exp(0.05) is 5.1% more


def test_a_larger_threshold_stops_sooner() -> None:
    assert lengths(TABLE, 0.2, 0.3) == {"far": 40, "middle": 10, "near": 10}
    assert lengths(TABLE, 0.2, 0.5) == {"far": 10, "middle": 10, "near": 10}


def test_the_number_of_hard_targets() -> None:
    best = np.arange(10.0)
    assert [len(hard_targets(best, r)) for r in (0.01, 0.1, 0.25, 0.5, 1.0)] == [1, 1, 2, 5, 10]
    assert hard_targets(np.array([1.0, 2.0, 2.0, 2.0, 0.0]), 0.4).tolist() == [1, 2]


def random_table(seed: int) -> LossTable:
    losses = np.random.default_rng(seed).gamma(2.0, 1.0, (3, 4, 37)) / [[[1], [2], [3], [3]]]
    return LossTable(("a", "b", "c"), (1, 2, 3, 4), losses)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.5, 1.0]), st.randoms(use_true_random=False))
def test_the_order_of_targets_and_models_changes_nothing(seed: int, share: float, random) -> None:
    table = random_table(seed)
    targets, models = list(range(37)), list(range(3))
    random.shuffle(targets)
    random.shuffle(models)
    names = tuple(table.names[i] for i in models)
    shuffled = LossTable(names, table.contexts, table.losses[models][:, :, targets])
    assert recl(shuffled, share, 0.2) == recl(table, share, 0.2)
    assert ecl(shuffled, 0.2) == ecl(table, 0.2)


def integer_losses(seed: int) -> np.ndarray:
    """Losses with many ties."""
    return np.random.default_rng(seed).integers(0, 3, (3, 4, 12)).astype(float)


def test_intervals_do_not_depend_on_the_order_of_tied_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two targets with the same losses in another assignment to the models are different targets."""
    monkeypatch.setattr(measures, "RESAMPLES", 200)
    for seed in range(20):
        random = np.random.default_rng(seed)
        losses, order = random.integers(0, 2, (2, 3, 6)).astype(float), random.permutation(6)
        table = LossTable(("a", "b"), (1, 2, 3), losses)
        assert ecl(LossTable(("a", "b"), (1, 2, 3), losses[:, :, order]), 0.2) == ecl(table, 0.2)
        assert ecl(LossTable(("b", "a"), (1, 2, 3), losses[::-1]), 0.2) == ecl(table, 0.2)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.01, 0.3]))
def test_recl_equals_a_plain_implementation(seed: int, share: float, threshold: float) -> None:
    """Dai et al. 2019, appendix C, with loops over scalars; ties by position."""
    losses = integer_losses(seed) if seed % 2 else random_table(seed).losses
    (models, contexts, targets), names = losses.shape, "abc"
    found = recl(LossTable(tuple(names), tuple(range(1, contexts + 1)), losses), share, threshold)
    for i in range(models):
        k = 0
        while k + 1 < contexts:
            b = [min(losses[j, k, t] for j in range(models)) for t in range(targets)]
            T = sorted(range(targets), key=lambda t: (-b[t], t))[: max(1, round(share * targets))]
            before = math.exp(sum(b[t] for t in T) / len(T))
            after = math.exp(sum(min(b[t], losses[i, k + 1, t]) for t in T) / len(T))
            if (before - after) / before < threshold:
                break
            k += 1
        length = found[names[i]]
        assert (length.tokens, length.bounded) == (k + 1, k + 1 == contexts)
        assert length.low <= length.tokens <= length.high


def test_recl_depends_on_the_group() -> None:
    """Alone, `near` is measured on target 6, which it predicts from 20 on; the others predict it at every context."""
    alone = LossTable(("near",), CONTEXTS, LOSSES[2:])
    assert lengths(alone, 0.2) == {"near": 20}
    assert lengths(TABLE, 0.2)["near"] == 10


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.03, 0.3, 1.0]))
def test_resampled_gains_are_the_gains_of_the_resample(seed: int, share: float) -> None:
    table = random_table(seed)
    drawn = np.random.default_rng(seed).integers(0, table.targets, table.targets)
    counts = np.bincount(drawn, minlength=table.targets).astype(float)[None]
    np.testing.assert_allclose(
        resampled_gains(table.losses, share, counts)[0], gains(table.losses[:, :, drawn], share), atol=1e-12
    )


def test_intervals_contain_the_length_and_narrow_with_more_targets() -> None:
    source = MarkedLag(100)
    wide, narrow = (recl(ideal_table(source, blocks=n), 0.5, 0.2)["ideal"] for n in (10, 1000))
    assert wide.low <= wide.tokens <= wide.high
    assert narrow.low <= narrow.tokens <= narrow.high
    assert narrow.high - narrow.low <= wide.high - wide.low


def ideal_table(source: SyntheticSource, cuts: tuple[int, ...] = (), blocks: int = 400, step: int = 10) -> LossTable:
    """Ideal predictors of a source: one unlimited, the others limited to a number of tokens each."""
    contexts = tuple(range(step, 200 + 1, step))
    tokens = blocks * 110 + 200
    ids = source.sample(tokens)
    targets = source.targets(tokens)
    targets = targets[targets >= contexts[-1]][:2000]
    models = {"ideal": math.inf} | {f"cut-{cut}": cut for cut in cuts}
    losses = [[source.ideal_losses(ids, targets, int(min(c, cut))) for c in contexts] for cut in models.values()]
    return LossTable(tuple(models), contexts, np.array(losses))


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("d", [50, 99, 104])
def test_recl_of_a_known_source(d: int, share: float) -> None:
    """Every lag up to d matters: RECL is d to within one step, and for a limited predictor its limit."""
    found = recl(ideal_table(MarkedLag(d), cuts=(30, 45)), share)
    assert abs(found["ideal"].tokens - d) <= 10
    assert not found["ideal"].bounded
    assert abs(found["cut-30"].tokens - 30) <= 10
    assert abs(found["cut-45"].tokens - 45) <= 10


def test_differences_separate_models_and_not_copies() -> None:
    table = ideal_table(MarkedLag(50), cuts=(30,))
    twice = LossTable((*table.names, "copy"), table.contexts, np.concatenate([table.losses, table.losses[1:]]))
    length = {name: one.tokens for name, one in recl(twice, 0.5).items()}
    found = {(one.first, one.second): one for one in recl_differences(twice, 0.5)}
    assert set(found) == {("copy", "cut-30"), ("copy", "ideal"), ("cut-30", "ideal")}
    for (first, second), one in found.items():
        assert one.low <= one.tokens == length[first] - length[second] <= one.high
    assert found["cut-30", "ideal"].high < 0
    assert found["cut-30", "ideal"].longer < 0.01
    assert (found["copy", "cut-30"].low, found["copy", "cut-30"].high, found["copy", "cut-30"].longer) == (0, 0, 0.5)


def test_a_single_lag_is_found_by_ecl_and_missed_by_recl() -> None:
    table = ideal_table(ExactLag(100))
    assert ecl(table)["ideal"].tokens == 100
    assert recl(table, 0.1)["ideal"].tokens == 10
    assert ecl(ideal_table(ExactLag(95)))["ideal"].tokens == 100


def test_copying_and_associative_recall() -> None:
    assert ecl(ideal_table(Copy(60)))["ideal"].tokens == 70  # 61 tokens back
    recall = ideal_table(AssociativeRecall(40, keys=64))
    assert abs(recl(recall, 0.5)["ideal"].tokens - 82) <= 10
    assert abs(ecl(recall)["ideal"].tokens - 82) <= 10


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"share={share}"):
        recl(TABLE, share)


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.0, math.nan])
def test_a_threshold_outside_0_to_1_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match=f"threshold={threshold}"):
        recl(TABLE, 0.5, threshold)
    with pytest.raises(ConfigError, match=f"threshold={threshold}"):
        ecl(TABLE, threshold)


def test_invalid_tables_are_refused() -> None:
    hole = LOSSES.copy()
    hole[1, 2, 3] = np.nan
    with pytest.raises(DataError, match=r"1 of the 120 losses.*'middle'.* 30.* 3"):
        LossTable(NAMES, CONTEXTS, hole)
    with pytest.raises(DataError, match=r"\[2, 4, 10\].*\[3, 4, "):
        LossTable(NAMES, CONTEXTS, LOSSES[:2])
    with pytest.raises(DataError, match=r"\[3, 4, 0\].*\[3, 4, "):
        LossTable(NAMES, CONTEXTS, LOSSES[:, :, :0])
    with pytest.raises(DataError, match="'far'"):
        LossTable(("far", "far", "near"), CONTEXTS, LOSSES)
    with pytest.raises(ConfigError, match=r"\b10\b.*two"):
        LossTable(NAMES, (10,), LOSSES[:, :1])
    with pytest.raises(ConfigError, match="10, 30, 20, 40"):
        LossTable(NAMES, (10, 30, 20, 40), LOSSES)
    with pytest.raises(ConfigError, match=r"15 .*10, 20, 30, 40"):
        TABLE.at((10, 15))


def test_a_saved_table_is_loaded_again(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "t.npz")
    found = load_table(tmp_path / "t.npz")
    assert (found.names, found.contexts) == (NAMES, CONTEXTS)
    np.testing.assert_array_equal(found.losses, LOSSES)
    assert found.at((10, 30)).contexts == (10, 30)


@pytest.mark.parametrize(
    "content",
    [
        {"names": np.array(["a"]), "contexts": np.array([1, 2])},
        {"names": np.array(["a"]), "contexts": np.array([1.5, 2]), "losses": np.ones((1, 2, 3))},
        {"names": np.array(["a"]), "contexts": np.array([1, 2]), "losses": np.array([[["x"]]])},
        {"names": np.array([object()]), "contexts": np.array([1, 2]), "losses": np.ones((1, 2, 3))},
    ],
)
def test_tables_with_wrong_arrays_are_refused(tmp_path: Path, content: dict[str, np.ndarray]) -> None:
    np.savez(tmp_path / "t.npz", **content)
    with pytest.raises(LongspanError):
        load_table(tmp_path / "t.npz")


def test_files_that_are_not_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_bytes(b"not a table")
    np.save(tmp_path / "t.npy", np.ones(3))
    for path in (tmp_path / "t.npz", tmp_path / "t.npy", tmp_path, tmp_path / "nowhere.npz"):
        with pytest.raises(DataError):
            load_table(path)


def test_gains_by_chance_are_reported() -> None:
    """Noise that grows with the context: perplexity rises, but the better of two noisy losses looks like a gain."""
    random = np.random.default_rng(0)
    noisy = np.stack([2 + 0.1 * k + random.normal(0, 0.3, 500) for k in range(4)])
    sure = np.stack([np.full(500, 2 - 0.1 * k) for k in range(4)])
    table = LossTable(("noisy", "sure"), CONTEXTS, np.stack([noisy, sure]))
    alone = LossTable(("noisy",), CONTEXTS, noisy[None])
    assert recl(alone, 1.0)["noisy"].tokens > 10
    assert len(chance_gains(alone, [recl(alone, 1.0)])) == 1
    assert re.search(r"noisy .*\b10\b", chance_gains(alone, [recl(alone, 1.0)])[0])
    assert not any("sure" in note for note in chance_gains(table, [recl(table, 1.0)]))
