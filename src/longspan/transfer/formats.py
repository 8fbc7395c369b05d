"""Input transformations (Radford et al. 2018, section 3.3): an example becomes sequences of tokens.

    single      [start] text [extract]
    pair        [start] first [separator] second [extract]
    similarity  both orders of a pair, a sequence each; a bidirectional model reads one order. One text is read as it is
    symmetric   a pair whose order has no meaning (MRPC): as for a similarity
    choice      a pair of premise and choice for every choice
    tags        [start] words [extract]; a causal model reads the words twice, so that a tag depends on later words

Bidirectional models have no [start]. BERT, which classifies at the first position, reads [extract] text [separator];
the others read text [separator] [extract]. A tokenizer without these tokens has the end of a document, or a newline, in
place of a separator and of [extract], and no [start].
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError, DataWarning, LongspanError, counted
from longspan.reading import Reading
from longspan.tokenizers import Tokenizer
from longspan.tokenizers.text import to_bytes
from longspan.transfer.encoded import encode_texts
from longspan.transfer.tasks.task import Example, Kind, Label

Ids = NDArray[np.int64]
ROLES = {
    "start": ("<|start|>", "<s>", "<bos>"),
    "separator": ("<|separator|>", "[SEP]", "<sep>"),
    "extract": ("<|extract|>", "[CLS]", "<cls>"),
}
"""The names of special tokens in tokenizers, most preferred first."""
MILLIONTHS = 1_000_000
"""Targets are integers, so scores are counted in millionths."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of an example and, for tags, the position of each word in the first one."""

    rows: tuple[Ids, ...]
    marks: Ids
    targets: tuple[int, ...]
    """A class, millionths of a score, the index of a choice, or a class per word; empty if the label is unknown."""

    @property
    def length(self) -> int:
        return max(len(row) for row in self.rows)


@runtime_checkable
class Reads(Protocol):
    """What a format needs to know about a model."""

    @property
    def causal(self) -> bool: ...
    @property
    def classify_at(self) -> Literal["first", "last", "both"]: ...
    @property
    def reading(self) -> Reading: ...
    def has_memory(self) -> bool: ...


class Format:
    """Converts examples of one kind for one model and tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        kind: Kind,
        labels: Sequence[str],
        model: Reads,
        longest: int | None = None,
        *,
        reverse: bool = False,
        symmetric: bool = False,
    ) -> None:
        """`reverse` reads every text from its end, for a backward language model; `symmetric` reads both orders of a
        pair, as for a similarity."""
        self.tokenizer, self.kind, self.reverse = tokenizer, kind, reverse
        self.labels = {label: k for k, label in enumerate(labels)}
        self.symmetric = symmetric or kind == "similarity"
        self.first, self.causal = model.classify_at == "first", model.causal
        limits = [longest] if longest else []
        if not model.has_memory():
            limits.append(model.reading.segment)  # without memory a document is one segment
        self.longest = min(limits, default=None)
        end = self._end()
        known = {role: self._find(names) for role, names in ROLES.items()}
        self.start = [known["start"]] if known["start"] is not None and self.causal else []
        self.separator = end if known["separator"] is None else [known["separator"]]
        self.extract = end if known["extract"] is None else [known["extract"]]

    def _find(self, names: Sequence[str]) -> int | None:
        return next((found for name in names if (found := self.tokenizer.token_id(name)) is not None), None)

    def _end(self) -> list[int]:
        if self.tokenizer.document_end_id is not None:
            return [self.tokenizer.document_end_id]
        try:
            return [int(token) for token in self.tokenizer.encode_prompt("\n")[:1]]
        except LongspanError:  # a tokenizer of characters may not know a newline
            return []

    @property
    def other_tag(self) -> str:
        """The predicted tag of words beyond the longest sequence."""
        return "O" if "O" in self.labels else next(iter(self.labels))

    def encode(self, examples: Sequence[Example], name: str = "the input") -> list[Sequences]:
        """The sequences of all examples. All texts are encoded together, which is faster. `name` is for warnings."""
        spaced = self.kind == "tags"
        texts = [text for example in examples for text in as_bytes(example, self.kind)]
        found = iter(encode_texts(self.tokenizer, texts))
        make = self._tagged if spaced else self._document
        made = [make(example, [next(found).astype(np.int64) for _ in example.texts]) for example in examples]
        if spaced:
            self._warn_of_cut(examples, made, name)
        return made

    def _warn_of_cut(self, examples: Sequence[Example], made: Sequence[Sequences], name: str) -> None:
        cut = [len(example.texts) - len(one.marks) for example, one in zip(examples, made, strict=True)]
        if any(cut):
            gone = f"{counted(sum(cut), 'word')} in {counted(sum(map(bool, cut)), 'sentence')}"
            warnings.warn(
                f"{gone} of {name} do not fit into a sequence, because model.longest or training.segment allows "
                f"{counted(self.longest or 0, 'token')}; {'they are not trained on' * (name == 'train')}"
                f"{f'their predicted tag is {self.other_tag!r}' * (name != 'train')}",
                DataWarning,
                stacklevel=3,
            )

    def _document(self, example: Example, texts: list[Ids]) -> Sequences:
        parts: list[tuple[Ids, ...]]
        if len(texts) == 1:
            parts = [(texts[0],)]
        elif self.kind == "choice":
            parts = [(texts[0], choice) for choice in texts[1:]]
        else:
            parts = [(texts[0], texts[1])]
            parts += [(texts[1], texts[0])] if self.symmetric and self.causal else []
        rows = tuple(self._join(list(part)) for part in parts)
        return Sequences(rows, np.empty(0, np.int64), self._target(example.label))

    def _join(self, texts: list[Ids]) -> Ids:
        """The texts between special tokens, each shortened so that the sequence is not too long."""
        inside = [np.array(self.separator, np.int64)] * (len(texts) - 1)
        before, after = self.ends()
        if self.longest is not None:
            limit = self.longest - len(before) - len(after) - sum(map(len, inside))
            texts = shorten(texts, max(limit, len(texts)))
        texts = [text[::-1] for text in texts] if self.reverse else texts
        parts = [texts[0], *(part for pair in zip(inside, texts[1:], strict=True) for part in pair)]
        return np.concatenate([before, *parts, after])

    def ends(self) -> tuple[Ids, Ids]:
        """What precedes and follows the texts."""
        if self.first:
            return np.array(self.extract, np.int64), np.array(self.separator, np.int64)
        # XLNet also ends the last text with a separator.
        last = [] if self.causal else self.separator
        return np.array(self.start, np.int64), np.array([*last, *self.extract], np.int64)

    def _tagged(self, example: Example, words: list[Ids]) -> Sequences:
        unknown = self.tokenizer.encode_prompt("?").astype(np.int64)[:1]
        words = [word if len(word) else unknown for word in words]  # a normaliser may remove a whole word
        before, after = self.ends()
        once, separator = np.concatenate(words), np.array(self.separator, np.int64)
        ahead = np.concatenate([before, once, separator]) if self.causal else before
        sizes = np.array([len(word) for word in words])
        # A causal model has read a word at its last token; others mark the first one, as BERT does.
        marks = len(ahead) + np.cumsum(sizes) - (1 if self.causal else sizes)
        row = np.concatenate([ahead, once, after])
        if self.longest is not None and len(row) > self.longest:
            row, marks = row[: self.longest], marks[marks < self.longest]
        return Sequences((row,), marks, self._target(example.label)[: len(marks)])

    def _target(self, label: Label | None) -> tuple[int, ...]:
        if label is None:
            return ()
        if self.kind == "similarity":
            return (round(float(label) * MILLIONTHS),)  # type: ignore[arg-type]
        if self.kind == "choice":
            return (int(label),)  # type: ignore[arg-type]
        names: Any = label if self.kind == "tags" else (label,)
        for name in names:
            if name not in self.labels:
                known = ", ".join(map(repr, self.labels))
                raise DataError(f"the label {name!r:.40} does not occur in train, whose labels are {known:.200}")
        return tuple(self.labels[name] for name in names)


def as_bytes(example: Example, kind: Kind) -> list[bytes]:
    """The texts of an example as they are encoded. Words follow a space."""
    return [to_bytes(f" {text}" if kind == "tags" else text) for text in example.texts]


def shorten(texts: list[Ids], limit: int) -> list[Ids]:
    """Texts of at most `limit` tokens together. The longest is shortened first; of a text that is cut, the first
    quarter and the end stay, because reviews give their verdict at the end (Sun et al. 2019)."""
    sizes = fit([len(text) for text in texts], limit)
    return [_cut(text, size) if size < len(text) else text for text, size in zip(texts, sizes, strict=True)]


def _cut(text: Ids, size: int) -> Ids:
    head = size // 4
    return np.concatenate([text[:head], text[len(text) - (size - head) :]])


def fit(sizes: list[int], limit: int) -> list[int]:
    """Sizes whose sum is at most `limit`. Longer texts are cut to the same size; a remainder is given to the last of
    them, one token each."""
    if sum(sizes) <= limit:
        return sizes
    left, share = limit, 0
    for k, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - k)  # an equal share of what the smaller ones leave
        if size > share:
            break
        left -= size
    reduced = [min(size, share) for size in sizes]
    longer = [k for k, size in enumerate(sizes) if size > share]
    for k in longer[len(longer) - (limit - sum(reduced)) :]:
        reduced[k] += 1
    return reduced
