"""TokenizerSpec: how to build the tokenizer of a corpus, and from which splits."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from longspan.data.splits import Piece
from longspan.errors import UnknownNameError
from longspan.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, Unit, WordTokenizer
from longspan.tokenizers.characters import Alphabet, count_characters
from longspan.tokenizers.text import read_blocks
from longspan.tokenizers.words import EOS, UNK, count_words


@dataclass(frozen=True)
class TokenizerSpec:
    """A recipe for a tokenizer, independent of the text it will be built from.

    The vocabulary is built from `vocabulary_splits`, and `by_count` sorts it by frequency. `dropped` and `alphabet` are
    options of CharacterTokenizer, `special`, `minimum` and `lower` of WordTokenizer, and `plain` of ByteTokenizer.
    """

    kind: Literal["bytes", "characters", "words"]
    description: str
    vocabulary_splits: tuple[str, ...] = ("train",)
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

    def build(self, pieces: Iterable[Piece]) -> Tokenizer:
        """The tokenizer with the vocabulary of these pieces of text."""
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

# The *-authors specs follow kimiyoung/transformer-xl (getdata.sh, prep_text8.py, pytorch/data_utils.py and
# pytorch/utils/vocabulary.py) and salesforce/awd-lstm-lm (prep_enwik8.py, which getdata.sh fetches). There, symbols are
# sorted by count, with ties by first appearance. <eos> has id 0 and ends every line of PTB and WikiText-103, but not of
# enwik8 and text8. Only PTB is lower-cased. The vocabulary of WikiText-103 comes from its training split, that of the
# others from all splits.
TOKENIZER_SPECS: dict[str, TokenizerSpec] = {
    "bytes": TokenizerSpec("bytes", "every byte, 256 symbols"),
    "plain-bytes": TokenizerSpec(
        "bytes", "every byte except carriage returns and byte order marks, 256 symbols", plain=True
    ),
    "characters": TokenizerSpec("characters", "characters of the training text, sorted"),
    "words": TokenizerSpec("words", "words of the training text by count, <eos> after each line, <unk> for others"),
    "enwik8-authors": TokenizerSpec(
        "characters", "bytes by count, newlines dropped", _ALL, by_count=True, dropped="\n", alphabet="bytes"
    ),
    "text8-authors": TokenizerSpec("characters", "characters by count", _ALL, by_count=True),
    "ptb-authors": TokenizerSpec(
        "words", "lower-case words by count, <eos> after each line", _ALL, special=(EOS,), lower=True
    ),
    "wikitext-103-authors": TokenizerSpec("words", "training words by count, <eos> after each line", special=(EOS,)),
}


def find_tokenizer_spec(name: str) -> TokenizerSpec:
    if name not in TOKENIZER_SPECS:
        raise UnknownNameError("tokenizer", name, TOKENIZER_SPECS)
    return TOKENIZER_SPECS[name]


def _blocks(piece: Piece) -> Iterator[bytes]:
    return read_blocks(piece.path, piece.start, piece.stop)
