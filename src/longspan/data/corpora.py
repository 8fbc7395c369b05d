"""Known corpora: URL, checksums, split rule and tokenizer of each."""

from dataclasses import dataclass
from pathlib import Path

from longspan.data.cache import cache_folder
from longspan.data.splits import ByCount, ByDocument, ByFile, ByName, ByPercent, ByTail, SplitRule
from longspan.data.tokenizer_specs import find_tokenizer_spec
from longspan.errors import UnknownNameError

_OTHER_FILES = 64 << 20  # an archive may contain other files too


@dataclass(frozen=True)
class CorpusFile:
    """An unpacked file of a corpus. `sha1` is for files whose publishers give no SHA-256."""

    name: str
    size: int | None = None
    sha256: str | None = None
    sha1: str | None = None


@dataclass(frozen=True)
class Corpus:
    """A known corpus.

    `get` must find all of `files` in the source. A corpus with an empty list takes every file, or those that match
    `patterns`, and `documents` and `size` are their number and total bytes. `limit` is the most bytes a download of
    unknown size may have. `files_of` names the corpus whose installed files this one uses. `complete` is a pattern and
    the number of files that match it, of which a source has all or none. A corpus with `parts` is made of the installed
    files of other corpora: the train splits of all of them, and the valid and test splits of the first.
    """

    name: str
    title: str
    licence: str
    tokenizer: str
    split: SplitRule
    files: tuple[CorpusFile, ...] = ()
    url: str | None = None
    archive_sha256: str | None = None
    documents: int | None = None
    size: int | None = None
    files_of: str | None = None
    parts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("*",)
    complete: tuple[str, int] | None = None
    limit: int = 1 << 30
    built_in: bool = False

    def folder(self, cache: Path) -> Path:
        """The folder of its installed files."""
        return cache / "corpora" / (self.files_of or self.name)

    @property
    def bytes(self) -> int | None:
        sizes = [file.size for file in self.files if file.size is not None]
        return sum(sizes) if self.files and len(sizes) == len(self.files) else self.size

    @property
    def download_limit(self) -> int:
        """The most bytes a download may have."""
        return (self.bytes or self.limit) + _OTHER_FILES


_WIKIPEDIA = "CC BY-SA / GFDL (Wikipedia)"
_ENWIK8 = CorpusFile("enwik8", 100_000_000, "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8")
_ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
_ENWIK8_ZIP = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
# The SHA-1 of text8 and WikiText-103 are from GluonNLP and Apache MXNet. Theirs of WikiText-2 are those of our files.
_TEXT8 = CorpusFile("text8", 100_000_000, sha1="0dc3edebc970dcc96137e7deda4d9995af9d93de")
_TEXT8_URL = "http://mattmahoney.net/dc/text8.zip"
_TEXT8_ZIP = "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"

_CORPORA = (
    Corpus(
        "stdlib",
        "source code of this Python's standard library, one document per file",
        "PSF licence",
        "bytes",
        ByDocument(),
        built_in=True,
    ),
    Corpus(
        "enwik8",
        "the first 100 MB of Wikipedia, all bytes",
        _WIKIPEDIA,
        "bytes",
        ByTail(),
        (_ENWIK8,),
        _ENWIK8_URL,
        _ENWIK8_ZIP,
    ),
    Corpus(
        "enwik8-authors",
        "enwik8 as preprocessed by Dai et al., newlines dropped",
        _WIKIPEDIA,
        "enwik8-authors",
        ByTail(),
        (_ENWIK8,),
        _ENWIK8_URL,
        _ENWIK8_ZIP,
        files_of="enwik8",
    ),
    Corpus(
        "text8",
        "100 MB of Wikipedia as a to z and space",
        _WIKIPEDIA,
        "characters",
        ByTail(),
        (_TEXT8,),
        _TEXT8_URL,
        _TEXT8_ZIP,
    ),
    Corpus(
        "text8-authors",
        "text8 as preprocessed by Dai et al., spaces trimmed from each split",
        _WIKIPEDIA,
        "text8-authors",
        ByTail(trimmed=True),
        (_TEXT8,),
        _TEXT8_URL,
        _TEXT8_ZIP,
        files_of="text8",
    ),
    Corpus(
        "wikitext-103",
        "103 million words of Wikipedia articles, as preprocessed by Dai et al.",
        _WIKIPEDIA,
        "wikitext-103-authors",
        ByFile("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        (
            CorpusFile("wiki.train.tokens", sha1="b7497e2dfe77e72cfef5e3dbc61b7b53712ac211"),
            CorpusFile("wiki.valid.tokens", sha1="c326ac59dc587676d58c422eb8a03e119582f92b"),
            CorpusFile("wiki.test.tokens", sha1="8a5befc548865cec54ed4273cf87dbbad60d1e47"),
        ),
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
    Corpus(
        "wikitext-2",
        "2 million words of Wikipedia articles, as preprocessed by Dai et al.",
        _WIKIPEDIA,
        "wikitext-2-authors",
        ByFile("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        (
            CorpusFile(
                "wiki.train.tokens", 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"
            ),
            CorpusFile(
                "wiki.valid.tokens", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"
            ),
            CorpusFile(
                "wiki.test.tokens", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"
            ),
        ),
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
    ),
    Corpus(
        "lm1b",
        "One Billion Word: shuffled sentences of news, as preprocessed by Dai et al.; valid and test are one section",
        "Apache 2.0 (benchmark)",
        "lm1b-authors",
        ByFile("news.en-0*-of-00100", "news.en.heldout-00000-of-00050", "news.en.heldout-00000-of-00050"),
        url="http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
        patterns=("news.en-0*-of-00100", "news.en.heldout-0*-of-00050", "1b_word_vocab.txt"),
        complete=("news.en-0*-of-00100", 99),
        limit=4 << 30,
    ),
    Corpus(
        "ptb",
        "Penn Treebank words, Mikolov's version, as preprocessed by Dai et al.",
        "research only",
        "ptb-authors",
        ByFile("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        (
            CorpusFile("ptb.train.txt", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            CorpusFile("ptb.valid.txt", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            CorpusFile("ptb.test.txt", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        ),
        "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
    Corpus(
        "tinyshakespeare",
        "a megabyte of Shakespeare's plays",
        "public domain",
        "bytes",
        ByPercent(),
        (CorpusFile("input.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),),
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    ),
    # Held out, by their places in the order of the names: docs/bundled_model.md#the-text has the titles.
    Corpus(
        "english-novels",
        "98 English novels, 1839 to 1930, one document each; 3 novels are valid and 5 are test",
        "public domain",
        "plain-bytes",
        ByCount(valid=3, test=5),
        documents=98,
        size=77_151_744,
    ),
    Corpus(
        "gutenberg-books",
        "206 books of Project Gutenberg, one document each; of every 20 the 19th is valid and the 20th is test",
        "public domain in the USA",
        "plain-bytes",
        ByDocument(),
        documents=206,
        size=108_230_942,
    ),
    # Compared by sequences of eight words: no book has text of a novel. docs/bundled_model.md#the-text
    Corpus(
        "novels-and-books",
        "the train splits of english-novels and gutenberg-books; valid and test are those of english-novels",
        "public domain in the USA",
        "plain-bytes",
        ByName(),
        parts=("english-novels", "gutenberg-books"),
        size=77_151_744 + 108_230_942,
    ),
)

CORPORA: dict[str, Corpus] = {corpus.name: corpus for corpus in _CORPORA}


def find_corpus(name: str) -> Corpus:
    if name not in CORPORA:
        raise UnknownNameError("corpus", name, CORPORA)
    return CORPORA[name]


@dataclass(frozen=True)
class CorpusRow:
    """One row of `longspan data list`. `tokenizer` describes the corpus's own tokenizer."""

    name: str
    title: str
    tokenizer: str
    bytes: int | None
    licence: str
    url: str | None
    sha256: dict[str, str]
    installed: bool


def list_corpora(cache: Path | None = None) -> list[CorpusRow]:
    """Every known corpus, and whether it is installed in the cache."""
    root = cache_folder(cache)
    rows = []
    for corpus in CORPORA.values():
        known = {file.name: file.sha256 for file in corpus.files if file.sha256}
        if corpus.url and corpus.archive_sha256:
            known[corpus.url.rpartition("/")[2]] = corpus.archive_sha256
        description = find_tokenizer_spec(corpus.tokenizer).description
        parts = [CORPORA[part] for part in corpus.parts] or [corpus]
        installed = corpus.built_in or all(part.folder(root).is_dir() for part in parts)
        facts = (corpus.name, corpus.title, description, corpus.bytes, corpus.licence, corpus.url, known, installed)
        rows.append(CorpusRow(*facts))
    return rows
