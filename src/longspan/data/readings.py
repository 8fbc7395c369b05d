"""Readings: which tokenizer a corpus is read with, and from what its symbols are taken."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from longspan.data.splits import Piece
from longspan.errors import UnknownNameError
from longspan.tokens import ByteTokenizer, CharacterTokenizer, Tokenizer, Unit, WordTokenizer
from longspan.tokens.characters import Alphabet, count_characters
from longspan.tokens.text import read_blocks
from longspan.tokens.words import EOS, UNK, count_words


@dataclass(frozen=True)
class Reading:
    """A way to read a corpus, before its text has been seen.

    `counted` names the splits whose symbols make the vocabulary, `by_count` orders it by frequency; `dropped` and
    `alphabet` are those of CharacterTokenizer, `special`, `minimum` and `lower` those of WordTokenizer,
    `plain` that of ByteTokenizer.
    """

    kind: Literal["bytes", "characters", "words"]
    says: str
    counted: tuple[str, ...] = ("train",)
    by_count: bool = False
    dropped: str = ""
    alphabet: Alphabet = "unicode"
    special: tuple[str, ...] = (EOS, UNK)
    minimum: int = 1
    lower: bool = False
    plain: bool = False

    @property
    def unit(self) -> Unit:
        if self.kind == "words":
            return "word"
        return "byte" if self.kind == "bytes" or self.alphabet == "bytes" else "character"

    def tokenizer(self, pieces: Iterable[Piece]) -> Tokenizer:
        """The tokenizer this reading makes of these pieces of text."""
        if self.kind == "bytes":
            return ByteTokenizer(self.plain)
        if self.kind == "characters":
            symbols: Counter[str] = Counter()
            for piece in pieces:
                symbols.update(count_characters(_blocks(piece), self.alphabet, str(piece.path)))
            return CharacterTokenizer.from_counts(symbols, self.by_count, self.dropped, self.alphabet)
        words: Counter[str] = Counter()
        for piece in pieces:
            words.update(count_words(_blocks(piece), self.lower, str(piece.path)))
        return WordTokenizer.from_counts(words, self.special, self.minimum, self.lower)


_ALL = ("train", "valid", "test")

# The authors' readings are those of kimiyoung/transformer-xl: getdata.sh, prep_text8.py, pytorch/data_utils.py and
# pytorch/utils/vocabulary.py, and salesforce/awd-lstm-lm's prep_enwik8.py, which getdata.sh fetches. There, symbols
# are numbered by count with ties by first appearance; <eos> is number 0 and added to every line of PTB and
# WikiText-103, to none of enwik8 and text8; PTB alone is put into lower case; WikiText-103 alone is counted on its
# training text alone.
READINGS: dict[str, Reading] = {
    "bytes": Reading("bytes", "every byte, 256 symbols"),
    "plain-bytes": Reading("bytes", "every byte but carriage returns and byte-order marks, 256 symbols", plain=True),
    "characters": Reading("characters", "the characters of the training text, sorted"),
    "words": Reading("words", "the words of the training text by count, <eos> for each line, <unk> for the rest"),
    "enwik8-authors": Reading(
        "characters", "bytes by count, newlines dropped", _ALL, by_count=True, dropped="\n", alphabet="bytes"
    ),
    "text8-authors": Reading("characters", "characters by count", _ALL, by_count=True),
    "ptb-authors": Reading("words", "lower-case words by count, <eos> for each line", _ALL, special=(EOS,), lower=True),
    "wikitext-103-authors": Reading("words", "training words by count, <eos> for each line", special=(EOS,)),
}


def find_reading(name: str) -> Reading:
    if name not in READINGS:
        raise UnknownNameError("reading", name, READINGS)
    return READINGS[name]


def _blocks(piece: Piece) -> Iterator[bytes]:
    return read_blocks(piece.path, piece.start, piece.stop)
