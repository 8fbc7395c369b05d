"""The authors' tokenization: tiny texts by hand, and the real corpora if ../shared/data exists."""

import dataclasses
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from longspan.data import CORPORA, get, list_corpora, open_corpus
from longspan.data.corpora import Corpus, CorpusFile
from longspan.data.splits import ByFile, ByTail
from longspan.errors import DataError

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real corpora are not here")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def install(cache: Path, corpus: Corpus, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the files of a known corpus by a text of a few bytes."""
    monkeypatch.setitem(CORPORA, corpus.name, dataclasses.replace(corpus, files=tuple(map(CorpusFile, files))))
    folder = corpus.folder(cache)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_enwik8_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like prep_enwik8.py and Vocab: bytes as numbers, a newline as line end, counts over all splits."""
    text = b"<a>\n\n b\xc3\xa9\nb b\r\n a\xc3\n"
    corpus = dataclasses.replace(CORPORA["enwik8-authors"], split=ByTail(5, 4), files_of=None)
    install(tmp_path, corpus, {"enwik8": text}, monkeypatch)
    parts = {"train": text[:-9], "valid": text[-9:-4], "test": text[-4:]}
    counts: Counter[str] = Counter()
    lines = {}
    for split, part in parts.items():
        written = " ".join([str(c) if c != ord("\n") else "\n" for c in part])
        lines[split] = [line.strip().split() for line in written.splitlines()]
        for line in lines[split]:
            counts.update(line)
    order = [symbol for symbol, _ in counts.most_common()]
    for split in parts:
        opened = open_corpus("enwik8-authors", split, cache=tmp_path)
        assert opened.ids.tolist() == [order.index(symbol) for line in lines[split] for symbol in line]
        assert opened.tokenizer.size == len(order)


def test_text8_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b" the five boxing wizards jump quickly at a term of abuse "
    for name in ("text8", "text8-authors"):
        corpus = dataclasses.replace(CORPORA[name], split=dataclasses.replace(CORPORA[name].split, valid=7, test=7))
        install(tmp_path / name, corpus, {"text8": text}, monkeypatch)
    ours, theirs = (open_corpus(name, "test", cache=tmp_path / name) for name in ("text8", "text8-authors"))
    assert ours.tokenizer.decode(ours.ids) == " abuse "
    assert theirs.tokenizer.decode(theirs.ids) == "abuse"
    stripped = [text[:-14].strip(), text[-14:-7].strip(), text[-7:].strip()]
    counts = Counter(c for part in stripped for c in part.decode())
    assert list(theirs.tokenizer.to_dict()["symbols"]) == [c for c, _ in counts.most_common()]


@pytest.mark.parametrize("name", ["ptb", "wikitext-2", "wikitext-103"])
def test_words_by_hand(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": " The cat <unk> the \n\n = a = \n", "valid": " a cat \n", "test": " the The \n"}
    corpus = CORPORA[name]
    assert isinstance(corpus.split, ByFile)
    files = {getattr(corpus.split, split): part.encode() for split, part in parts.items()}
    install(tmp_path, corpus, files, monkeypatch)
    lower = name == "ptb"
    tokens = {s: (p.lower() if lower else p).replace("\n", " <eos> ").split() for s, p in parts.items()}
    counted = [word for s in (["train"] if name == "wikitext-103" else parts) for word in tokens[s] if word != "<eos>"]
    order = ["<eos>", *(word for word, _ in Counter(counted).most_common())]
    for split in parts:
        opened = open_corpus(name, split, cache=tmp_path)
        assert [order[k] for k in opened.ids] == tokens[split]
        assert opened.tokenizer.size == len(order)


def authors_stream(sentences: list[list[str]], length: int) -> list[tuple[str, str]]:
    """Inputs and targets of data_utils.py (LMShuffledIterator with one row): what remains of a sentence is continued in
    the next segment, and a sentence of which one token remains is dropped."""
    pairs: list[tuple[str, str]] = []
    waiting, stream = iter([["<S>", *words, "<S>"] for words in sentences]), []
    while True:
        filled: list[tuple[str, str]] = []
        while len(filled) < length:
            if len(stream) <= 1:
                try:
                    stream = next(waiting)
                except StopIteration:
                    return pairs + filled  # the authors drop an incomplete segment
            new = min(len(stream) - 1, length - len(filled))
            filled += itertools.islice(itertools.pairwise(stream), new)
            stream = stream[new:]
        pairs += filled


@pytest.mark.parametrize("listed", [False, True], ids=["counted", "vocabulary-file"])
def test_one_billion_word_by_hand(listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = "the cat sat on the mat\nthe dog sat\nthe cat , the dog , the sat ,\n"
    held_out = "the cat barked\na dog , sat\n\nthe mat\n"
    files = {"news.en-00001-of-00100": train, "news.en.heldout-00000-of-00050": held_out}
    if listed:
        files["1b_word_vocab.txt"] = "<S> 3\n<UNK> 1\nsat 3\nthe 7\n"
    folder = CORPORA["lm1b"].folder(tmp_path)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    order = ["<S>", "<UNK>", "sat", "the"] if listed else ["<S>", "<UNK>", "the", "sat", ","]
    for split, text in (("train", train), ("valid", held_out), ("test", held_out)):
        opened = open_corpus("lm1b", split, cache=tmp_path)
        words = [[word if word in order else "<UNK>" for word in line.split()] for line in text.splitlines()]
        ours = [order[k] for k in opened.ids]
        assert list(itertools.pairwise(ours)) == authors_stream(words, 4)
        assert opened.tokenizer.size == len(order)
        assert opened.starts.tolist() == [0]
        sentences = opened.by_sentence()
        assert [ours[k] for k in sentences.starts] == ["<S>"] * len(words)
        assert (sentences.ids == opened.ids).all()
        assert sentences.fingerprint != opened.fingerprint
    assert len(open_corpus("lm1b", cache=tmp_path).starts) == 2


@needs_real
def test_wikitext_2(cache: Path) -> None:
    get("wikitext-2", REAL / "wikitext-2.tar.xz", cache)
    opened = [open_corpus("wikitext-2", split, cache=cache) for split in ("train", "valid", "test")]
    assert [len(part) for part in opened] == [2_088_628, 217_646, 245_569]
    assert opened[0].tokenizer.size == 33_278


@needs_real
def test_one_billion_word(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training text is not here: section 10 takes its place, and 11 that of section 0."""
    sections = {"train": "news.en.heldout-00010-of-00050", "held_out": "news.en.heldout-00011-of-00050"}
    rule = ByFile(sections["train"], sections["held_out"], sections["held_out"])
    monkeypatch.setitem(CORPORA, "lm1b", dataclasses.replace(CORPORA["lm1b"], split=rule))
    folder = get("lm1b", REAL / "1bw-heldout.tar.xz", cache)
    lines = {name: (folder / file).read_text("utf-8").split("\n")[:-1] for name, file in sections.items()}
    assert [len(found) for found in lines.values()] == [6111, 6105]
    counts = Counter(word for line in lines["train"] for word in line.split())
    order = ["<S>", "<UNK>", *(word for word, count in counts.most_common() if count >= 3)]
    place = {word: k for k, word in enumerate(order)}
    opened = open_corpus("lm1b", "test", cache=cache)
    assert opened.tokenizer.size == len(order)
    words = [line.split() for line in lines["held_out"]]
    expected = [k for line in words for k in (0, *(place.get(word, 1) for word in line))] + [0]
    assert opened.ids.tolist() == expected
    assert len(opened.by_sentence().starts) == 6105


@needs_real
def test_penn_treebank(cache: Path) -> None:
    get("ptb", REAL / "ptb", cache)
    opened = [open_corpus("ptb", split, cache=cache) for split in ("train", "valid", "test")]
    assert [len(part) for part in opened] == [929_589, 73_760, 82_430]
    assert opened[0].tokenizer.size == 10_000
    assert opened[0].tokenizer.fingerprint == opened[2].tokenizer.fingerprint


@needs_real
def test_tiny_shakespeare(cache: Path) -> None:
    get("tinyshakespeare", REAL / "tinyshakespeare" / "input.txt.xz", cache)
    text = open_corpus("tinyshakespeare", None, "characters", cache=cache)
    assert (len(text), text.tokenizer.size) == (1_115_394, 65)


@needs_real
def test_enwik8_of_both_tokenizers(cache: Path) -> None:
    get("enwik8", REAL / "enwik8.xz", cache)
    assert len(open_corpus("enwik8", "test", cache=cache)) == 5_000_000
    theirs = open_corpus("enwik8-authors", "test", cache=cache)
    assert theirs.tokenizer.size == 204
    assert (len(theirs), theirs.bytes) == (4_943_417, 5_000_000)


@needs_real
def test_novels_have_plain_bytes(cache: Path) -> None:
    get("english-novels", REAL / "english_novels.tar.xz", cache)
    opened = open_corpus("english-novels", "valid", cache=cache)
    text = opened.ids.tobytes()
    assert b"\r" not in text
    assert b"\xef\xbb\xbf" not in text
    unchanged = open_corpus("english-novels", "valid", "bytes", cache=cache)
    assert text == unchanged.ids.tobytes().replace(b"\r", b"").replace(b"\xef\xbb\xbf", b"")


def test_a_corpus_of_parts_trains_on_all_and_holds_out_the_first(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="get english-novels and gutenberg-books"):
        get("novels-and-books", tmp_path, tmp_path)
    folders = {name: CORPORA[name].folder(tmp_path) for name in ("english-novels", "gutenberg-books")}
    for (name, folder), count in zip(folders.items(), (9, 20), strict=True):
        with pytest.raises(DataError, match=f"{name} is not installed"):
            open_corpus("novels-and-books", "train", cache=tmp_path)
        folder.mkdir(parents=True)
        for k in range(count):
            (folder / f"{k:02}.txt").write_text(f"{name} {k}.")
    for split in ("valid", "test"):
        whole, part = (open_corpus(name, split, cache=tmp_path) for name in ("novels-and-books", "english-novels"))
        assert whole.ids.tobytes() == part.ids.tobytes()
    train = open_corpus("novels-and-books", "train", cache=tmp_path)
    parts = [open_corpus(name, "train", cache=tmp_path) for name in folders]
    assert train.ids.tobytes() == b"".join(part.ids.tobytes() for part in parts)
    assert train.splits["unused"] == ("gutenberg-books/18.txt", "gutenberg-books/19.txt")
    assert next(row for row in list_corpora(tmp_path) if row.name == "novels-and-books").installed


@needs_real
def test_the_docs_name_the_held_out_novels(cache: Path) -> None:
    """Every novel begins with its title."""
    get("english-novels", REAL / "english_novels.tar.xz", cache)
    page = Path(__file__).resolve().parents[2] / "docs" / "bundled_model.md"
    for split, count in (("valid", 3), ("test", 5)):
        opened = open_corpus("english-novels", split, cache=cache)
        (line,) = (line for line in page.read_text().splitlines() if line.startswith(f"| {split} |"))
        titles = re.findall(r"\*(.+?)\*", line)
        assert len(titles) == len(opened.starts) == count
        for title, start in zip(titles, opened.starts, strict=True):
            assert bytes(opened.ids[start : start + 60]).decode().strip().lower().startswith(title.lower())
