"""Metrics agree with scikit-learn, scipy and seqeval, and with cases computed by hand."""

import random

import numpy as np
import pytest

from longspan.transfer.metrics import (
    accuracy,
    compute,
    entities,
    entity_f1,
    f1,
    is_entity_tag,
    macro_f1,
    matthews,
    pearson,
    spearman,
)

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def test_by_hand() -> None:
    gold, predicted = ["1", "1", "0", "0", "1"], ["1", "0", "0", "1", "1"]
    assert accuracy(gold, predicted) == pytest.approx(3 / 5)
    assert f1(gold, predicted) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    # tp 2, tn 1, fp 1, fn 1: (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2)
    assert matthews(gold, predicted) == pytest.approx(1 / 6)
    assert spearman([1, 2, 2, 4], [10, 20, 30, 40]) == pytest.approx(pearson([1, 2.5, 2.5, 4], [1, 2, 3, 4]))
    assert matthews(gold, ["1"] * 5) == pearson([1, 2], [3, 3]) == 0


def test_entities_by_hand() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC", "B-LOC"]]
    predicted = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-LOC", "I-LOC"]]
    assert entity_f1(gold, predicted) == pytest.approx(2 * 1 / (4 + 3))


def test_entities_of_bioes_tags_by_hand() -> None:
    """Two neighbours of one type, an entity of one word, one of three, and an E- without a beginning."""
    gold = [["S-PER", "S-PER", "O", "B-LOC", "I-LOC", "E-LOC", "E-LOC"]]
    assert entities(gold) == {(0, "PER", 0, 0), (0, "PER", 1, 1), (0, "LOC", 3, 5), (0, "LOC", 6, 6)}
    predicted = [["S-PER", "O", "O", "B-LOC", "I-LOC", "E-LOC", "O"]]
    assert entity_f1(gold, predicted) == pytest.approx(2 * 2 / (4 + 2))
    assert [is_entity_tag(tag) for tag in ("O", "E-X", "L-X", "NN", "B-", "B")] == [True, True] + [False] * 4


def test_the_positive_class_is_that_of_training() -> None:
    """Also in a split without it: then nothing is found, and F1 is 0."""
    assert compute("f1", "single", ["no", "yes"], ["no", "no"], ["no", "no"]) == 0
    assert compute("f1", "single", ["no", "yes"], ["no", "yes"], ["yes", "yes"]) == pytest.approx(2 / 3)
    assert compute("accuracy", "tags", ["A", "B"], [["A", "B"], ["A"]], [["A", "A"], ["A"]]) == pytest.approx(2 / 3)


@pytest.mark.slow  # takes seconds to import
def test_classes_against_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(3)
    for classes in (2, 4):
        gold, predicted = (draw.integers(0, classes, 50).astype(str).tolist() for _ in range(2))
        assert matthews(gold, predicted) == pytest.approx(sklearn.matthews_corrcoef(gold, predicted))
        assert macro_f1(gold, predicted) == pytest.approx(sklearn.f1_score(gold, predicted, average="macro"))


def test_correlations_against_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(4)
    gold, predicted = draw.integers(0, 6, 80), draw.normal(size=80).round(1)
    assert pearson(gold, predicted) == pytest.approx(stats.pearsonr(gold, predicted)[0])
    assert spearman(gold, predicted) == pytest.approx(stats.spearmanr(gold, predicted)[0])


@pytest.mark.slow
@pytest.mark.parametrize("known", [TAGS, [*TAGS, "E-PER", "S-PER", "E-LOC", "S-LOC"]])
def test_entities_against_seqeval(known: list[str]) -> None:
    """Random tags, invalid sequences such as O I-PER included."""
    seqeval = pytest.importorskip("seqeval.metrics")
    draw = random.Random(5)
    for _ in range(30):
        gold, predicted = ([draw.choices(known, k=n) for n in (1, 7, 12)] for _ in range(2))
        assert entity_f1(gold, predicted) == pytest.approx(seqeval.f1_score(gold, predicted, zero_division=0))
