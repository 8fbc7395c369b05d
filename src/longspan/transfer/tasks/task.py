"""Task and Example: what a data set asks for, and one row of it.

The kind of a task follows from the keys of its rows:

    single      text, label
    pair        premise, hypothesis, label    or    text_a, text_b, label
    similarity  text_a, text_b, score         or    text, score
    choice      premise, choice1, choice2, ..., label (the index of the right choice)
    tags        words, tags
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from longspan import config
from longspan.errors import ConfigError, DataError, UnknownNameError, counted
from longspan.transfer.metrics import METRICS, SUITABLE

Kind = Literal["single", "pair", "similarity", "choice", "tags"]
Label = str | float | int | tuple[str, ...]
DEFAULT_METRIC: dict[str, str] = {"similarity": "pearson", "tags": "entity-f1"}
LARGEST_SCORE = 10**9
_CHOICE = re.compile("choice[0-9]+")
_PAIRS = (("premise", "hypothesis"), ("text_a", "text_b"))
_KNOWN_COLUMNS = (
    "text, or premise and hypothesis, or text_a and text_b (each with label or score), or premise, choice1, choice2, "
    "... and label, or words and tags"
)


@dataclass(frozen=True)
class Example:
    """One row. `texts` are the text, both texts, the premise and its choices, or the words of a sentence."""

    texts: tuple[str, ...]
    label: Label | None = None
    """A class name, a score, the index of a choice, or a tag per word; None if unknown."""

    def unseen(self, labels: Sequence[str]) -> str | None:
        """The first class or tag that is not one of `labels`, which are empty for a task without classes."""
        names = self.label if isinstance(self.label, tuple) else (self.label,)
        found = (str(name) for name in names if labels and name is not None and name not in labels)
        return next(found, None)


@dataclass(frozen=True, kw_only=True)
class Task:
    """How rows become examples. A folder may state it in task.toml: `kind`, `texts`, `label`, `metrics`,
    `symmetric`."""

    name: str
    kind: Kind
    texts: tuple[str, ...]
    """The keys of the texts in a row."""
    label: str = "label"
    metrics: tuple[str, ...] = ()
    """The first one selects the best checkpoint. Default: accuracy, pearson or entity-f1."""
    symmetric: bool = False
    """The order of both texts has no meaning, so a causal model reads both orders. Always so for a similarity."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UnknownNameError("kind of task", self.kind, get_args(Kind))
        object.__setattr__(self, "metrics", self.metrics or (DEFAULT_METRIC.get(self.kind, "accuracy"),))
        for name in self.metrics:
            if name not in METRICS:
                raise UnknownNameError("metric", name, METRICS)
            if name not in SUITABLE[self.kind]:
                known = ", ".join(SUITABLE[self.kind])
                raise ConfigError(f"the metric {name} cannot be used with kind={self.kind!r}; use {known}")
        if self.symmetric and self.kind not in ("pair", "similarity"):
            raise ConfigError(f"symmetric=true needs a task of pairs, not kind={self.kind!r}; leave it out")
        wanted = {"single": (1,), "pair": (2,), "similarity": (2, 1), "tags": (1,)}.get(self.kind, ())
        if len(self.texts) not in wanted and (wanted or len(self.texts) < 3):
            raise ConfigError(
                f"the task {self.name} has texts={config.shown(self.texts)}; kind={self.kind!r} needs "
                f"{' or '.join(map(str, wanted)) or 'a premise and at least 2 choices'}"
            )

    @property
    def metric(self) -> str:
        return self.metrics[0]

    def example(self, row: Mapping[str, Any], where: str, *, labelled: bool = True) -> Example:
        """The example of a row. `where` names the file and line in errors."""
        texts = tuple(_text(row, key, where, words=self.kind == "tags") for key in self.texts)
        flat = texts[0] if self.kind == "tags" else texts
        if self.kind == "choice":
            self._check_choices(row, where)
        value = row.get(self.label)
        if value is None or value == "":
            if labelled:
                instead = _instead(row, self.label)
                raise DataError(
                    f"{where} has no {self.label!r}{instead}; every row of this split needs one"
                    f"{'; task.toml can name another column' * bool(instead)}"
                )
            return Example(flat)
        return Example(flat, self._label(value, len(flat), where))

    def _check_choices(self, row: Mapping[str, Any], where: str) -> None:
        if more := [key for key in row if _CHOICE.fullmatch(key) and row[key] and key not in self.texts]:
            count = counted(len(self.texts) - 1, "choice")
            raise DataError(f"{where} has {more[0]!r}, but the task has {count}; use the same number in every row")

    def _label(self, value: Any, count: int, where: str) -> Label:
        if self.kind == "tags":
            tags = _words(value, self.label, where)
            if len(tags) != count:
                sizes = f"{counted(count, 'word')} and {counted(len(tags), 'tag')}"
                raise DataError(f"{where} has {sizes}; use one tag per word")
            return tags
        if self.kind == "similarity":
            return _score(value, self.label, where)
        if self.kind == "choice":
            return _index(value, len(self.texts) - 1, self.label, where)
        return _class(value, self.label, where)


def _score(value: Any, key: str, where: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not abs(score) <= LARGEST_SCORE:  # NaN included
        raise DataError(f"{where} has {key}={value!r:.40}; use a number up to {LARGEST_SCORE:,}")
    return score


def _index(value: Any, choices: int, key: str, where: str) -> int:
    try:
        number = float(value)
        index = int(number) if number.is_integer() else -1
    except (TypeError, ValueError, OverflowError):
        index = -1
    if not 0 <= index < choices:
        raise DataError(f"{where} has {key}={value!r:.40}; use an index from 0 to {choices - 1}")
    return index


def _class(value: Any, key: str, where: str) -> str:
    """The name of a class. 1, 1.0 and "1" are the same."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return _encodable(str(value), key, where)
    raise DataError(f"{where} has {key}={value!r:.40}; use a name or a number")


def _words(value: Any, key: str, where: str) -> tuple[str, ...]:
    """The items of a list, or the words between spaces."""
    found = value.split() if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(word, str | int | float) for word in found):
        raise DataError(f"{where} has {key}={value!r:.40}; use a list of words, or words separated by spaces")
    return tuple(_encodable(str(word), key, where) for word in found)


def _text(row: Mapping[str, Any], key: str, where: str, *, words: bool) -> Any:
    value = row.get(key)
    if words:
        found = _words([] if value is None else value, key, where)
        if not found:
            raise DataError(
                f"{where} has no words under {key!r}{_instead(row, key)}; use a list of words, or words separated by "
                "spaces"
            )
        return found
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where} has {key}={value!r:.40}, which is not a text; put it in quotes")
    if not value or not value.strip():
        raise DataError(f"{where} has no text under {key!r}{_instead(row, key)}; every row needs one")
    return _encodable(value, key, where)


def _encodable(text: str, key: str, where: str) -> str:
    """The same text. JSON can contain half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has a lone surrogate (U+{ord(text[error.start]):04X}) under {key!r}, which UTF-8 cannot encode; "
            "remove it"
        ) from None
    return text


def recognise(name: str, row: Mapping[str, Any], given: Mapping[str, Any], train: Path) -> Task:
    """The task of rows like this one, the first of `train`; `given` are the values of the task.toml beside it."""
    values = {"name": name} | _shape(row) | dict(given)
    if set(given) <= set(config.keys(Task)) and not {"kind", "texts"} <= set(values):
        place = " in its first line" * (train.suffix == ".csv")
        raise ConfigError(
            f"{train} has the columns {_columns(row)}{place}; expected {_KNOWN_COLUMNS}; "
            "rename them, or set kind, texts and label in a task.toml"
        )
    try:
        return config.build(Task, values)
    except ConfigError as error:
        raise ConfigError(f"{train.with_name('task.toml')}: {error}") from None


def _columns(row: Mapping[str, Any]) -> str:
    return f"{', '.join(map(repr, row)):.200}"


def _instead(row: Mapping[str, Any], key: str) -> str:
    """The columns of a row that does not have this one."""
    return "" if key in row else f", only {_columns(row)}"


def _shape(row: Mapping[str, Any]) -> dict[str, Any]:
    choices = sorted(filter(_CHOICE.fullmatch, row), key=lambda key: int(key[6:]))
    if len(choices) > 1:
        return {"kind": "choice", "texts": ["premise", *choices]}
    for pair in _PAIRS:
        if set(pair) <= set(row):
            scored = "score" in row and "label" not in row
            return {"kind": "similarity" if scored else "pair", "texts": pair} | ({"label": "score"} if scored else {})
    for words in ("words", "tokens"):
        if words in row and "tags" in row:
            return {"kind": "tags", "texts": [words], "label": "tags"}
    if "text" in row and "score" in row and "label" not in row:
        return {"kind": "similarity", "texts": ["text"], "label": "score"}
    return {"kind": "single", "texts": ["text"]} if "text" in row else {}
