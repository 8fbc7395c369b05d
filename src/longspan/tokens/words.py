"""Words: what stands between whitespace, and `<eos>` where a line ends."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import CheckpointError, DataError
from longspan.tokens.text import decode_utf8, read_blocks, universal_newlines, whole_words
from longspan.tokens.tokenizer import FORMAT, Ids, Tokenizer, Unit, stored

EOS, UNK = "<eos>", "<unk>"
# The vocabulary of One Billion Word writes its unknown word in capitals.
_UNKNOWN_WORDS = (UNK, "<UNK>")


@dataclass(frozen=True)
class WordTokenizer(Tokenizer):
    """Word k of `words` is token k.

    Every line, the last one too, ends in `<eos>` if the vocabulary has it. A word that is not there is `<unk>`; where
    there is no `<unk>` it is an error. Written back, a word is followed by a space and `<eos>` is a newline.
    """

    words: tuple[str, ...]
    lower: bool = False

    kind: ClassVar[str] = "words"

    def __post_init__(self) -> None:
        if not self.words:
            raise DataError("a word tokenizer needs at least one word; the text it was made from holds none")
        seen: set[str] = set()
        for k, word in enumerate(self.words):
            if word.split() != [word]:
                raise DataError(f"word {k} of the vocabulary is {word[:40]!r}; words hold no whitespace")
            if word in seen:
                raise DataError(f"the vocabulary lists {word[:40]!r} twice; each word has one number")
            seen.add(word)

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        special: Sequence[str] = (EOS, UNK),
        minimum: int = 1,
        lower: bool = False,
    ) -> "WordTokenizer":
        """The special words, then the others by count; equals in the order of `counts`, which is that of appearance.

        So do the authors order theirs (vocabulary.py: special symbols, then Counter.most_common).
        """
        kept = [word for word, count in counts.items() if count >= minimum and word not in special]
        return cls((*special, *sorted(kept, key=lambda word: -counts[word])), lower)

    @classmethod
    def from_vocabulary(cls, path: Path, lower: bool = False) -> "WordTokenizer":
        """The words of a file whose line number is the id; what follows a word on its line, a count say, is ignored."""
        text = "".join(universal_newlines(decode_utf8(read_blocks(path), str(path))))
        words: dict[str, int] = {}
        for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            fields = line.split(maxsplit=1)
            if not fields:
                raise DataError(f"line {number} of the vocabulary {path} is empty; each line holds the word of that id")
            if fields[0] in words:
                first = words[fields[0]]
                raise DataError(f"line {number} of the vocabulary {path} repeats {fields[0][:40]!r} of line {first}")
            words[fields[0]] = number
        return cls(tuple(words), lower)

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
        """The id of words that are not in the vocabulary."""
        return next((self._ids[word] for word in _UNKNOWN_WORDS if word in self._ids), None)

    @cached_property
    def _spelled(self) -> list[bytes]:
        return [b"\n" if word == EOS else f"{word} ".encode() for word in self.words]

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", goes_on: bool = False) -> Iterator[Ids]:
        last = "\n"
        for text in lines_of_words(blocks, self.lower, name):
            last = text[-1]
            # A line's end becomes the word that stands for it, so that one split finds words and ends alike.
            found = (text.replace("\n", f" {EOS} ") if EOS in self._ids else text).split()
            yield np.array(self._look_up(found, name), self.dtype)
        if last != "\n" and EOS in self._ids and not goes_on:
            yield np.array([self._ids[EOS]], self.dtype)

    def _look_up(self, found: list[str], name: str) -> list[int]:
        ids, unknown = self._ids, self.unknown
        if unknown is not None:
            return [ids.get(word, unknown) for word in found]
        try:
            return [ids[word] for word in found]
        except KeyError as error:
            raise DataError(
                f"{name} has the word {error.args[0][:40]!r}, which is not among the {self.size} of the vocabulary, "
                f"and the vocabulary has no {UNK}; add one of the two"
            ) from None

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        return b"".join([self._spelled[k] for k in self._checked(ids).tolist()])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "format": FORMAT, "words": list(self.words), "lower": self.lower}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "WordTokenizer":
        words, lower = stored(values, "words", list), stored(values, "lower", bool)
        for word in words:
            if not isinstance(word, str) or any("\ud800" <= c <= "\udfff" for c in word):
                raise CheckpointError(f"the stored tokenizer lists {str(word)[:40]!r}, which is no word")
        try:
            return cls(tuple(words), lower)
        except DataError as error:
            raise CheckpointError(f"the stored tokenizer is damaged: {error}") from None


def lines_of_words(blocks: Iterable[bytes], lower: bool, name: str) -> Iterator[str]:
    r"""A text in pieces that split no word, its lines ended by \n, in lower case where asked."""
    for text in whole_words(universal_newlines(decode_utf8(blocks, name))):
        yield text.lower() if lower else text


def count_words(blocks: Iterable[bytes], lower: bool = False, name: str = "the text") -> Counter[str]:
    """How often each word occurs, in the order of first appearance."""
    counts: Counter[str] = Counter()
    for text in lines_of_words(blocks, lower, name):
        counts.update(text.split())
    return counts
