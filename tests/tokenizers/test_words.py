import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import DataError
from longspan.tokenizers import WordTokenizer
from longspan.tokenizers.words import EOS, UNK, count_words

# Words, all kinds of whitespace in Python, and both line ends.
texts = st.text(st.sampled_from("abΣé\ufeff\0 \t\n\r\x0b\x1c\x85\xa0\u2028\u3000"), max_size=40)


def authors_tokenize(text: str, lower: bool) -> list[str]:
    """The authors' Vocab.tokenize with add_eos, over the lines of a text file."""
    found: list[str] = []
    for line in io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"):
        stripped = line.strip()
        found += [*(stripped.lower() if lower else stripped).split(), EOS]
    return found


@given(texts, st.booleans(), st.integers(1, 5))
def test_words_and_line_ends_match_the_authors(text: str, lower: bool, size: int) -> None:
    expected = authors_tokenize(text, lower)
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
def test_decoded_text_gives_the_same_ids(text: str) -> None:
    tokenizer = WordTokenizer.from_counts(count_words([text.encode()]))
    ids = tokenizer.encode(text)
    assert np.array_equal(tokenizer.encode(tokenizer.decode(ids)), ids)
    assert b"".join(tokenizer.decode_bytes([k]) for k in ids) == tokenizer.decode_bytes(ids)


def test_a_prompt_gets_no_end_of_line() -> None:
    tokenizer = WordTokenizer((EOS, "a", "b"))
    assert tokenizer.encode("a b").tolist() == [1, 2, 0]
    assert tokenizer.encode_prompt("a b").tolist() == [1, 2]
    assert tokenizer.encode_prompt("a b\n").tolist() == [1, 2, 0]


def test_rare_words_are_unknown() -> None:
    tokenizer = WordTokenizer.from_counts(count_words([b"a b a c b d"]), minimum=2)
    assert tokenizer.words == (EOS, UNK, "a", "b")
    assert tokenizer.encode("a c\n").tolist() == [2, 1, 0]


def test_without_unk_an_unknown_word_is_an_error() -> None:
    with pytest.raises(DataError, match=r"the text .*'c'.* 2 .*<unk>"):
        WordTokenizer(("a", "b")).encode("a b c")


def test_without_eos_line_ends_are_ignored() -> None:
    assert WordTokenizer(("a", "b")).encode("a\n\nb\n").tolist() == [0, 1]


def test_a_vocabulary_file(tmp_path: Path) -> None:
    path = tmp_path / "VOCAB.txt"
    path.write_bytes("<S> 12\r\n<UNK>\r\nna\u00efve 3\r\n".encode())
    tokenizer = WordTokenizer.from_vocabulary(path)
    assert tokenizer.words == ("<S>", "<UNK>", "na\u00efve")
    assert tokenizer.encode("na\u00efve what").tolist() == [2, 1]
    path.write_text("a\n\nb\n")
    with pytest.raises(DataError, match=r"line 2 .*VOCAB\.txt"):
        WordTokenizer.from_vocabulary(path)
    path.write_text("a\nb\na\n")
    with pytest.raises(DataError, match=r"line 3 .*'a' of line 1"):
        WordTokenizer.from_vocabulary(path)
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(DataError, match=r"VOCAB\.txt .*byte 2"):
        WordTokenizer.from_vocabulary(path)
    with pytest.raises(DataError, match="/none"):
        WordTokenizer.from_vocabulary(tmp_path / "none")


def test_ids_have_the_smallest_dtype() -> None:
    def dtype_of(size: int) -> np.dtype:
        return WordTokenizer(tuple(str(k) for k in range(size))).encode("1 2").dtype

    assert [dtype_of(size) for size in (256, 257, 65536, 65537)] == [np.uint8, np.uint16, np.uint16, np.int32]


def test_invalid_words_are_refused() -> None:
    for words, values in (
        ((), "word"),
        (("a b",), "word 0 of the vocabulary is 'a b'"),
        (("",), "''"),
        (("a", "a"), "'a'"),
    ):
        with pytest.raises(DataError, match=re.escape(values)):
            WordTokenizer(words)
