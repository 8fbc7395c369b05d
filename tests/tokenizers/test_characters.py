from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import DataError
from longspan.tokenizers import CharacterTokenizer
from longspan.tokenizers.characters import count_characters

texts = st.text(min_size=1)
EVERYTHING = CharacterTokenizer("".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)])))


@given(texts)
def test_round_trip_of_any_text(text: str) -> None:
    tokenizer = CharacterTokenizer.from_counts(count_characters([text.encode()]))
    assert list(tokenizer.symbols) == sorted(set(text))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()


@given(texts, st.integers(1, 7))
def test_blocks_may_divide_characters(text: str, size: int) -> None:
    data = text.encode()
    blocks = [data[k : k + size] for k in range(0, len(data), size)]
    assert count_characters(blocks) == Counter(text)
    tokenizer = CharacterTokenizer.from_counts(count_characters(blocks))
    assert np.array_equal(np.concatenate(list(tokenizer.encode_stream(blocks))), tokenizer.encode(text))


@given(texts)
def test_order_by_count_matches_counter(text: str) -> None:
    tokenizer = CharacterTokenizer.from_counts(count_characters([text.encode()]), by_count=True)
    assert list(tokenizer.symbols) == [symbol for symbol, _ in Counter(text).most_common()]


def test_an_unknown_character_is_named_with_its_position() -> None:
    tokenizer = CharacterTokenizer("ab")
    with pytest.raises(DataError, match=r"character 3 of the text.*'é' \(U\+00E9\).* 2 symbols"):
        tokenizer.encode("abaé")
    with pytest.raises(DataError, match=r"character 2 .*'\\x00'"):
        list(tokenizer.encode_stream([b"a", b"b\0"]))


@given(st.binary(max_size=40), st.integers(1, 5))
def test_invalid_utf8_is_named_with_its_byte(data: bytes, size: int) -> None:
    blocks = [data[k : k + size] for k in range(0, len(data), size)]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        for given_blocks in ([data], blocks):
            with pytest.raises(DataError, match=f"UTF-8 .*byte {error.start} "):
                list(EVERYTHING.encode_stream(given_blocks))
    else:
        assert EVERYTHING.decode(EVERYTHING.encode(data)) == text


def test_the_alphabet_of_bytes_drops_newlines() -> None:
    tokenizer = CharacterTokenizer.from_counts(
        count_characters([b"b\na\xffb"], "bytes"), by_count=True, dropped="\n", alphabet="bytes"
    )
    assert tokenizer.symbols == "ba\xff"
    assert tokenizer.unit == "byte"
    assert tokenizer.encode(b"\na\n\nb\xff\n").tolist() == [1, 0, 2]
    assert tokenizer.decode_bytes([2, 1]) == b"\xffa"
    with pytest.raises(DataError, match=r"byte 1 of the text.*'c'"):
        tokenizer.encode(b"\nc")


def test_invalid_symbols_are_refused() -> None:
    with pytest.raises(DataError, match=r"'a' \(U\+0061\).* 2 times"):
        CharacterTokenizer("aba")
    with pytest.raises(DataError, match="symbol"):
        CharacterTokenizer("")
    with pytest.raises(DataError, match=r"U\+0100.*byte"):
        CharacterTokenizer("a\u0100", alphabet="bytes")
