"""Tokens of a task's texts in the cache: equal to those of the tokenizer, and encoded once."""

from pathlib import Path

import numpy as np
import pytest

from longspan.tokenizers import ByteTokenizer, Tokenizer
from longspan.transfer import encoded
from longspan.transfer.encoded import encode_texts

TEXTS = [b"one", b"", b"two three", "vier f\u00fcnf".encode()]


class Counting(ByteTokenizer):
    calls = 0

    def encode_many(self, texts, name="the text", partial=False):
        Counting.calls += 1
        return super().encode_many(texts, name, partial)


def equal(found: list[np.ndarray], tokenizer: Tokenizer, texts: list[bytes]) -> bool:
    wanted = tokenizer.encode_many(texts)
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


def test_texts_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    monkeypatch.setattr(encoded, "KEPT", 4)
    plain, tokenizer = ByteTokenizer(), Counting()
    for calls in (1, 1):
        assert equal(encode_texts(tokenizer, TEXTS), plain, TEXTS)
        assert Counting.calls == calls
    # Other boundaries, another order and another tokenizer are other texts.
    for texts in ([b"onet", b"wo", b" three"], TEXTS[::-1]):
        assert equal(encode_texts(tokenizer, texts), plain, texts)
    assert equal(encode_texts(ByteTokenizer(plain=True), TEXTS), ByteTokenizer(plain=True), TEXTS)
    (file, *_) = sorted((tmp_path / "encoded-tasks").iterdir(), key=lambda path: path.stat().st_mtime)
    file.write_bytes(file.read_bytes()[:40])  # damaged: encoded again
    calls = Counting.calls
    assert equal(encode_texts(tokenizer, TEXTS), plain, TEXTS)
    assert Counting.calls == calls + 1
    assert equal(encode_texts(tokenizer, [b"one"]), plain, [b"one"])  # too short to be kept
    assert len(list((tmp_path / "encoded-tasks").iterdir())) == 4
