import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import DataError
from longspan.tokenizers import ByteTokenizer, tokenizer_from_dict


@given(st.binary())
def test_round_trip_of_any_bytes(data: bytes) -> None:
    ids = ByteTokenizer().encode(data)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(data)
    assert ByteTokenizer().decode_bytes(ids) == data


def test_a_string_is_encoded_as_utf8() -> None:
    assert ByteTokenizer().encode("\ufeffé\0").tolist() == [0xEF, 0xBB, 0xBF, 0xC3, 0xA9, 0]
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_invalid_ids_are_refused() -> None:
    with pytest.raises(DataError, match="token 256"):
        ByteTokenizer().decode([1, 256])
    with pytest.raises(DataError, match="token -1"):
        ByteTokenizer().decode_bytes([-1])
    with pytest.raises(DataError, match="float64"):
        ByteTokenizer().decode([0.5])


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(DataError, match=r"character 1 .*U\+D800"):
        ByteTokenizer().encode("a\ud800")


@given(st.binary(), st.lists(st.integers(0, 60), max_size=4).map(sorted))
def test_plain_bytes_do_not_depend_on_the_blocks(data: bytes, cuts: list[int]) -> None:
    text = b"\xef\xbb\xbfOne\r\ntwo \xef\xbb" + data + b"\xbf\r"
    blocks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    kept = b"".join(ids.tobytes() for ids in ByteTokenizer(plain=True).encode_stream(blocks))
    expected = text.replace(b"\xef\xbb\xbf", b"")
    assert kept.replace(b"\xef\xbb\xbf", b"") == expected.replace(b"\r", b"").replace(b"\xef\xbb\xbf", b"")
    assert b"\r" not in kept


def test_plain_is_stored() -> None:
    plain = ByteTokenizer(plain=True)
    assert tokenizer_from_dict(plain.to_dict()) == plain
    assert tokenizer_from_dict(ByteTokenizer().to_dict()) == ByteTokenizer()
    assert plain.fingerprint != ByteTokenizer().fingerprint
    assert plain.encode("\ufeffa\r\nb").tolist() == [97, 10, 98]
