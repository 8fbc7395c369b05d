"""TokenizerSpec: how to build the tokenizer of a corpus, and from which splits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from longspan.data.documents import tasks
from longspan.data.encoding import character_counter, run_tasks, useful_workers, word_counter
from longspan.data.splits import Piece
from longspan.data.word_counts import WordCounts
from longspan.errors import DataError, UnknownNameError
from longspan.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, Unit, WordTokenizer, read_tokenizer
from longspan.tokenizers.characters import Alphabet
from longspan.tokenizers.words import EOS, UNK


@dataclass(frozen=True)
class TokenizerSpec:
    """A recipe for a tokenizer, independent of the text it will be built from.

    The vocabulary is built from `vocabulary_splits`, and `by_count` sorts it by frequency. `dropped` and `alphabet` are
    options of CharacterTokenizer, `special`, `minimum`, `lower` and `boundary` of WordTokenizer, and `plain` of
    ByteTokenizer. A corpus that contains the `vocabulary_file` uses the words in it.
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
    boundary: str | None = None
    vocabulary_file: str | None = None
    plain: bool = False

    @property
    def unit(self) -> Unit:
        if self.kind == "words":
            return "word"
        return "byte" if self.kind == "bytes" or self.alphabet == "bytes" else "character"

    def build(
        self,
        pieces: Sequence[Piece],
        workers: int | None = None,
        folder: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Tokenizer:
        """The tokenizer with the vocabulary of these pieces of text. In `folder` are the counts that a killed process
        has left; `progress` is called with the bytes counted so far and in all."""
        if self.kind == "bytes":
            return ByteTokenizer(self.plain)
        job = word_counter(self.lower) if self.kind == "words" else character_counter(self.alphabet)
        total = sum(piece.size for piece in pieces)
        with WordCounts(folder=folder) as counts:
            todo = islice(tasks(pieces, self.unit), counts.tasks, None)
            for task, some in run_tasks(job, todo, workers or useful_workers(pieces)):
                counts.add(some, sum(chunk.size for chunk in task))
                if progress is not None:
                    progress(counts.read, total)
            if self.kind == "characters":
                symbols = counts.frequent()
                return CharacterTokenizer.from_counts(symbols, self.by_count, self.dropped, self.alphabet)
            return WordTokenizer.from_counts(counts.frequent(self.minimum), self.special, 1, self.lower, self.boundary)


_ALL = ("train", "valid", "test")

# The *-authors specs follow kimiyoung/transformer-xl (getdata.sh, prep_text8.py, pytorch/data_utils.py and
# pytorch/utils/vocabulary.py) and salesforce/awd-lstm-lm (prep_enwik8.py, which getdata.sh fetches). There, symbols are
# sorted by count, with ties by first appearance. <eos> has id 0 and ends every line of PTB and WikiText-103, but not of
# enwik8 and text8. Only PTB is lower-cased. The vocabulary of WikiText-103 comes from its training split, that of the
# others from all splits. Sentences of One Billion Word are encoded as <S> ... <S>, but the iterator of data_utils.py
# drops the second one as an input, so the tokens that a model reads are those of lm1b-authors. The authors take its
# vocabulary from a file of Jozefowicz et al.; without that file it is made as Chelba et al. (2013) say.
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
    "wikitext-2-authors": TokenizerSpec("words", "words by count, <eos> after each line", _ALL, special=(EOS,)),
    "lm1b-authors": TokenizerSpec(
        "words",
        "training words that occur three times by count, <S> before each sentence and at the end",
        special=("<S>", "<UNK>"),
        minimum=3,
        boundary="<S>",
        vocabulary_file="1b_word_vocab.txt",
    ),
    "wikitext-103-authors": TokenizerSpec("words", "training words by count, <eos> after each line", special=(EOS,)),
}


def find_tokenizer(name: str) -> "TokenizerSpec | Tokenizer":
    """The spec of that name, or the tokenizer in a file or folder."""
    if name not in TOKENIZER_SPECS and Path(name).exists():
        return read_tokenizer(Path(name))
    if "/" in name or name.endswith(".json"):
        raise DataError(f"there is no tokenizer file or folder {name}; check the name")
    return find_tokenizer_spec(name)


def find_tokenizer_spec(name: str) -> TokenizerSpec:
    if name not in TOKENIZER_SPECS:
        raise UnknownNameError("tokenizer", name, TOKENIZER_SPECS)
    return TOKENIZER_SPECS[name]
