import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import DataError
from longspan.tokens import WordTokenizer
from longspan.tokens.words import EOS, UNK, count_words

# Words, every kind of whitespace Python knows, and both ends of a line.
texts = st.text(st.sampled_from("abΣé\ufeff\0 \t\n\r\x0b\x1c\x85\xa0\u2028\u3000"), max_size=40)


def as_the_authors_do(text: str, lower: bool) -> list[str]:
    """Their Vocab.tokenize with add_eos over the lines of a file opened as text."""
    found: list[str] = []
    for line in io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"):
        stripped = line.strip()
        found += [*(stripped.lower() if lower else stripped).split(), EOS]
    return found


@given(texts, st.booleans(), st.integers(1, 5))
def test_lines_and_words_are_those_of_the_authors(text: str, lower: bool, size: int) -> None:
    expected = as_the_authors_do(text, lower)
    data = text.encode()
    blocks = [data[k : k + size] for k in range(0, len(data), size)]
    counts = count_words(blocks, lower)
    tokenizer = WordTokenizer.from_counts(counts, special=[EOS], lower=lower)
    counted = Counter(word for word in expected if word != EOS)
    assert list(tokenizer.words) == [EOS, *(word for word, _ in counted.most_common())]
    ids = tokenizer.encode(text)
    assert [tokenizer.words[k] for k in ids] == expected
    streamed = [np.empty(0, ids.dtype), *tokenizer.encode_stream(blocks)]
    assert np.array_equal(np.concatenate(streamed), ids)


@given(texts)
def test_what_is_written_reads_the_same(text: str) -> None:
    tokenizer = WordTokenizer.from_counts(count_words([text.encode()]))
    ids = tokenizer.encode(text)
    assert np.array_equal(tokenizer.encode(tokenizer.decode(ids)), ids)
    assert b"".join(tokenizer.decode_bytes([k]) for k in ids) == tokenizer.decode_bytes(ids)


def test_a_prompt_goes_on() -> None:
    tokenizer = WordTokenizer((EOS, "a", "b"))
    assert tokenizer.encode("a b").tolist() == [1, 2, 0]
    assert tokenizer.encode_prompt("a b").tolist() == [1, 2]
    assert tokenizer.encode_prompt("a b\n").tolist() == [1, 2, 0]


def test_rare_words_are_unknown() -> None:
    tokenizer = WordTokenizer.from_counts(count_words([b"a b a c b d"]), minimum=2)
    assert tokenizer.words == (EOS, UNK, "a", "b")
    assert tokenizer.encode("a c\n").tolist() == [2, 1, 0]


def test_without_unk_an_unknown_word_is_an_error() -> None:
    with pytest.raises(DataError, match="the text has the word 'c', which is not among the 2"):
        WordTokenizer(("a", "b")).encode("a b c")


def test_without_eos_lines_end_silently() -> None:
    assert WordTokenizer(("a", "b")).encode("a\n\nb\n").tolist() == [0, 1]


def test_a_vocabulary_file(tmp_path: Path) -> None:
    path = tmp_path / "VOCAB.txt"
    path.write_bytes("<S> 12\r\n<UNK>\r\nna\u00efve 3\r\n".encode())
    tokenizer = WordTokenizer.from_vocabulary(path)
    assert tokenizer.words == ("<S>", "<UNK>", "na\u00efve")
    assert tokenizer.encode("na\u00efve what").tolist() == [2, 1]
    path.write_text("a\n\nb\n")
    with pytest.raises(DataError, match="line 2 of the vocabulary"):
        WordTokenizer.from_vocabulary(path)
    path.write_text("a\nb\na\n")
    with pytest.raises(DataError, match=r"line 3 .* repeats 'a' of line 1"):
        WordTokenizer.from_vocabulary(path)
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(DataError, match="not UTF-8 at byte 2"):
        WordTokenizer.from_vocabulary(path)
    with pytest.raises(DataError, match="there is no file"):
        WordTokenizer.from_vocabulary(tmp_path / "none")


def test_ids_take_the_smallest_type() -> None:
    def sized(size: int) -> np.dtype:
        return WordTokenizer(tuple(str(k) for k in range(size))).encode("1 2").dtype

    assert [sized(size) for size in (256, 257, 65536, 65537)] == [np.uint8, np.uint16, np.uint16, np.int32]


def test_words_are_checked() -> None:
    for words, message in (((), "at least one"), (("a b",), "no whitespace"), (("",), "''"), (("a", "a"), "twice")):
        with pytest.raises(DataError, match=re.escape(message)):
            WordTokenizer(words)
