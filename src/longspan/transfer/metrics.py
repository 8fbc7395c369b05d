"""Metrics of tasks. All are at most 1, and higher is better.

Own short implementations: tests compare them with scikit-learn, scipy and seqeval, which nobody needs to install.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Metric = Callable[[Sequence[Any], Sequence[Any]], float]
Entity = tuple[int, str, int, int]


def accuracy(gold: Sequence[Any], predicted: Sequence[Any]) -> float:
    return float(np.mean([a == b for a, b in zip(gold, predicted, strict=True)]))


def f1(gold: Sequence[Any], predicted: Sequence[Any], positive: Any = None) -> float:
    """F1 of one class. Default: the last one in order of those that occur in `gold`."""
    positive = max(map(str, gold)) if positive is None else str(positive)
    pairs = [(str(a) == positive, str(b) == positive) for a, b in zip(gold, predicted, strict=True)]
    hits, errors = sum(a and b for a, b in pairs), sum(a != b for a, b in pairs)
    return _ratio(2 * hits, 2 * hits + errors)


def macro_f1(gold: Sequence[Any], predicted: Sequence[Any]) -> float:
    """The mean F1 over the classes that occur."""
    classes = sorted({str(label) for label in (*gold, *predicted)})
    return float(np.mean([f1(gold, predicted, one) for one in classes]))


def matthews(gold: Sequence[Any], predicted: Sequence[Any]) -> float:
    """Matthews correlation for any number of classes (Gorodkin 2004); 0 if either side is constant."""
    classes = {label: k for k, label in enumerate(sorted({str(label) for label in (*gold, *predicted)}))}
    a, b = (np.eye(len(classes))[[classes[str(label)] for label in side]] for side in (gold, predicted))
    covariance = float(((a - a.mean(0)) * (b - b.mean(0))).sum())
    norms = [float(((x - x.mean(0)) ** 2).sum()) for x in (a, b)]
    return _ratio(covariance, float(np.sqrt(norms[0] * norms[1])))


def pearson(gold: ArrayLike, predicted: ArrayLike) -> float:
    """Linear correlation; 0 if either side is constant."""
    a, b = (np.asarray(x, np.float64) - np.mean(np.asarray(x, np.float64)) for x in (gold, predicted))
    return _ratio(float(a @ b), float(np.sqrt((a @ a) * (b @ b))))


def spearman(gold: ArrayLike, predicted: ArrayLike) -> float:
    """Correlation of ranks; equal values share their mean rank."""
    return pearson(_ranks(np.asarray(gold)), _ranks(np.asarray(predicted)))


def entity_f1(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """F1 of complete entities, as seqeval computes it by default: an entity counts if its type and both ends agree."""
    a, b = entities(gold), entities(predicted)
    return _ratio(2 * len(a & b), len(a) + len(b))


def entities(sentences: Sequence[Sequence[str]]) -> set[Entity]:
    """(sentence, type, first word, last word) of BIO or BIOES tags. As in conlleval and seqeval, I- and E- begin an
    entity where none of their type is open."""
    found: set[Entity] = set()
    for number, tags in enumerate(sentences):
        kind, first, before = "", 0, "O"
        for k, tag in enumerate([*tags, "O"]):
            prefix, _, name = tag.partition("-")
            begins = prefix in ("B", "S") or before in ("E", "S", "O") or name != kind
            if kind and (begins or prefix == "O"):
                found.add((number, kind, first, k - 1))
                kind = ""
            if begins and prefix != "O":
                kind, first = name, k
            before = prefix
    return found


def is_entity_tag(tag: str) -> bool:
    """Whether `entities` knows the tag: O, or B, I, E or S with a type."""
    prefix, _, name = tag.partition("-")
    return tag == "O" or (prefix in ("B", "I", "E", "S") and bool(name))


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro-f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "entity-f1": entity_f1,
}
_OF_CLASSES = ("accuracy", "f1", "macro-f1", "matthews")
SUITABLE: dict[str, tuple[str, ...]] = {
    "single": _OF_CLASSES,
    "pair": _OF_CLASSES,
    "similarity": ("pearson", "spearman"),
    "choice": ("accuracy", "macro-f1", "matthews"),
    "tags": ("entity-f1", "accuracy"),
}
"""The metrics of every kind of task."""


def compute(name: str, kind: str, labels: Sequence[str], gold: Sequence[Any], predicted: Sequence[Any]) -> float:
    """A metric of a task. `labels` are the classes in training: the last one is the positive one of f1. The accuracy of
    tags is that of words."""
    if name == "f1":
        return f1(gold, predicted, max(labels))
    if name == "accuracy" and kind == "tags":
        gold, predicted = ([tag for tags in side for tag in tags] for side in (gold, predicted))
    return METRICS[name](gold, predicted)
