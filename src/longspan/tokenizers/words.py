"""WordTokenizer: words are separated by whitespace, and lines end in `<eos>`."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import CheckpointError, DataError
from longspan.tokenizers.characters import code_points, utf8_sizes
from longspan.tokenizers.text import complete_words, decode_utf8, read_blocks, to_bytes, universal_newlines
from longspan.tokenizers.tokenizer import FORMAT, Ids, Offsets, Tokenizer, Unit, stored_value

EOS, UNK = "<eos>", "<unk>"
# The vocabulary of One Billion Word spells it in capitals.
_UNKNOWN_WORDS = (UNK, "<UNK>")
_WORD_OR_NEWLINE = re.compile(r"\r\n|\r|\n|\S+")


@dataclass(frozen=True)
class WordTokenizer(Tokenizer):
    """Word k of `words` has id k.

    If the vocabulary has `<eos>`, every line ends in it, the last one included. With a `boundary`, such as `<S>`, every
    line begins with that instead, and the text ends in it. Other words are `<unk>`, or an error if the vocabulary has
    no `<unk>`. When decoded, a word is followed by a space, and `<eos>` or the boundary is a newline.
    """

    words: tuple[str, ...]
    lower: bool = False
    boundary: str | None = None

    kind: ClassVar[str] = "words"

    def __post_init__(self) -> None:
        if not self.words:
            raise DataError("a word tokenizer needs at least one word; the text it was built from has none")
        seen: set[str] = set()
        for k, word in enumerate(self.words):
            if word.split() != [word]:
                raise DataError(f"word {k} of the vocabulary is {word[:40]!r}; words must not contain whitespace")
            if word in seen:
                raise DataError(f"the vocabulary lists {word[:40]!r} twice; list each word once")
            seen.add(word)
        if self.boundary is not None and self.boundary not in seen:
            raise DataError(f"the vocabulary has no {self.boundary[:40]!r}, which begins every line; add it")

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        special: Sequence[str] = (EOS, UNK),
        minimum: int = 1,
        lower: bool = False,
        boundary: str | None = None,
    ) -> "WordTokenizer":
        """The special words, then the others by count, with ties in the order of `counts` (first appearance).

        This is the order of the authors' vocabulary.py: special symbols, then Counter.most_common.
        """
        kept = [word for word, count in counts.items() if count >= minimum and word not in special]
        return cls((*special, *sorted(kept, key=lambda word: -counts[word])), lower, boundary)

    @classmethod
    def from_vocabulary(cls, path: Path, lower: bool = False, boundary: str | None = None) -> "WordTokenizer":
        """The words of a file with one word per line, in order of id. The rest of a line (a count) is ignored."""
        text = "".join(universal_newlines(decode_utf8(read_blocks(path), str(path))))
        words: dict[str, int] = {}
        for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            fields = line.split(maxsplit=1)
            if not fields:
                raise DataError(f"line {number} of the vocabulary {path} is empty; put one word on each line")
            if fields[0] in words:
                first = words[fields[0]]
                raise DataError(
                    f"line {number} of the vocabulary {path} repeats {fields[0][:40]!r} of line {first}; remove one"
                )
            words[fields[0]] = number
        return cls(tuple(words), lower, boundary)

    @property
    def unit(self) -> Unit:
        return "word"

    @property
    def size(self) -> int:
        return len(self.words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: k for k, word in enumerate(self.words)}

    @cached_property
    def unknown(self) -> int | None:
        return next((self._ids[word] for word in _UNKNOWN_WORDS if word in self._ids), None)

    @property
    def boundary_id(self) -> int | None:
        """The id of the token that begins every line, or None."""
        return None if self.boundary is None else self._ids[self.boundary]

    @cached_property
    def _decoded_words(self) -> list[bytes]:
        return [b"\n" if word in (EOS, self.boundary) else f"{word} ".encode() for word in self.words]

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", partial: bool = False) -> Iterator[Ids]:
        if self.boundary is not None:
            yield from self._encode_lines(blocks, self.boundary, name, partial)
            return
        last = "\n"
        for text in word_blocks(blocks, self.lower, name):
            last = text[-1]
            # Newlines become <eos> first, so that one split finds words and line ends.
            words = (text.replace("\n", f" {EOS} ") if EOS in self._ids else text).split()
            yield np.array(self._look_up(words, name), self.dtype)
        if last != "\n" and EOS in self._ids and not partial:
            yield np.array([self._ids[EOS]], self.dtype)

    def _encode_lines(self, blocks: Iterable[bytes], boundary: str, name: str, partial: bool) -> Iterator[Ids]:
        """The boundary, then the lines with the boundary between them and at the end.

        At the end of a block it belongs to the next one: a chunk of a text begins with it and does not end in it.
        """
        begins, found = True, False
        for text in word_blocks(blocks, self.lower, name):
            lines = (f"{boundary} " * begins + text.removesuffix("\n")).replace("\n", f" {boundary} ")
            begins = text.endswith("\n")
            yield np.array(self._look_up(lines.split(), name), self.dtype)
            found = True
        if found and not partial:
            yield np.array([self._ids[boundary]], self.dtype)

    def encode_with_offsets(self, text: str | bytes) -> tuple[Ids, Offsets]:
        """A line end spans its newline. It is empty at the end of a text without one; so is a first boundary."""
        data = to_bytes(text)
        ids = self.encode(data)
        ends_lines = EOS in self._ids or self.boundary is not None
        found = [m.span() for m in _WORD_OR_NEWLINE.finditer(data.decode()) if ends_lines or not m[0].isspace()]
        points = code_points(data.decode())
        places = np.concatenate([[0], np.cumsum(utf8_sizes(points))])
        offsets = places[np.array(found, np.int64).reshape(-1, 2)]
        if self.boundary is not None and len(ids):
            offsets = np.concatenate([[[0, 0]], offsets])
        if len(offsets) < len(ids):
            offsets = np.concatenate([offsets, [[len(data), len(data)]]])
        assert len(offsets) == len(ids)
        return ids, offsets

    def _look_up(self, words: list[str], name: str) -> list[int]:
        ids, unknown = self._ids, self.unknown
        if unknown is not None:
            return [ids.get(word, unknown) for word in words]
        try:
            return [ids[word] for word in words]
        except KeyError as error:
            raise DataError(
                f"{name} has the word {error.args[0][:40]!r}, which is not among the {self.size} words of the "
                f"vocabulary; add it, or add {UNK}"
            ) from None

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        return b"".join([self._decoded_words[k] for k in self._check_ids(ids).tolist()])

    def to_dict(self) -> dict[str, Any]:
        values = {"kind": self.kind, "format": FORMAT, "words": list(self.words), "lower": self.lower}
        return values | ({} if self.boundary is None else {"boundary": self.boundary})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "WordTokenizer":
        words, lower = stored_value(values, "words", list), stored_value(values, "lower", bool)
        boundary = stored_value(values, "boundary", str) if "boundary" in values else None
        for word in words:
            if not isinstance(word, str) or any("\ud800" <= c <= "\udfff" for c in word):
                raise CheckpointError(
                    f"the stored tokenizer lists {str(word)[:40]!r}, which is not a word; it is damaged"
                )
        try:
            return cls(tuple(words), lower, boundary)
        except DataError as error:
            raise CheckpointError(f"the stored tokenizer is damaged: {error}") from None


def word_blocks(blocks: Iterable[bytes], lower: bool, name: str) -> Iterator[str]:
    r"""A text in pieces that split no word, with \n as line end, in lower case if `lower`."""
    for text in complete_words(universal_newlines(decode_utf8(blocks, name))):
        yield text.lower() if lower else text


def count_words(blocks: Iterable[bytes], lower: bool = False, name: str = "the text") -> Counter[str]:
    """The number of occurrences of each word, in the order of first appearance."""
    counts: Counter[str] = Counter()
    for text in word_blocks(blocks, lower, name):
        counts.update(text.split())
    return counts
