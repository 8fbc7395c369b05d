"""Properties of every tokenizer: storage, arbitrary bytes, time and memory for a line of any length."""

import json
import os
import random
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from longspan.errors import CheckpointError, DataError
from longspan.tokenizers import (
    KINDS,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    WordTokenizer,
    tokenizer_from_dict,
    tokenizer_from_json,
)

CASES = 50_000 if os.environ.get("LONGSPAN_TORTURE") else 3_000
EXAMPLES: list[Tokenizer] = [
    ByteTokenizer(),
    CharacterTokenizer("\0\n aé€😀\ufeff"),
    CharacterTokenizer("ba\xff", dropped="\n", alphabet="bytes"),
    WordTokenizer(("<eos>", "<unk>", "a", "é"), lower=True),
]
PARTS = [
    b"",
    b"a",
    b" ",
    b"\n",
    b"\r\n",
    b"\0",
    b"\xef\xbb\xbf",
    "é€😀".encode(),
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xf0\x9f",
]


@pytest.mark.parametrize("tokenizer", EXAMPLES, ids=lambda t: f"{t.kind}-{t.size}")
def test_json_round_trip(tokenizer: Tokenizer) -> None:
    loaded = tokenizer_from_json(json.dumps(tokenizer.to_dict()))
    assert loaded == tokenizer
    assert loaded.fingerprint == tokenizer.fingerprint
    assert KINDS[tokenizer.kind] is type(tokenizer)


def test_fingerprints_differ() -> None:
    assert len({tokenizer.fingerprint for tokenizer in EXAMPLES}) == len(EXAMPLES)


def test_damaged_json_is_a_checkpoint_error() -> None:
    """Every value is replaced by values of every type, keys are removed, and the JSON is not an object."""
    invalid: list[object] = [
        None,
        True,
        -1,
        1.5,
        "",
        "x",
        "aa",
        "\ud800",
        [],
        [1],
        ["a", "a"],
        ["a b"],
        ["\ud800"],
        {},
        [[]],
    ]
    for tokenizer in EXAMPLES:
        values = tokenizer.to_dict()
        for key in values:
            for value in [*invalid, ...]:
                changed = {**values, key: value}
                if value is ...:
                    del changed[key]
                try:
                    loaded = tokenizer_from_dict(changed)
                except CheckpointError:
                    continue
                assert loaded.to_dict() == changed
    for value in invalid:
        with pytest.raises(CheckpointError):
            tokenizer_from_dict(value)
    for text in (b"", b"{", b"\xff", b"[" * 100_000, b'{"kind": "bytes"}', b'{"kind": "bpe", "format": 1}'):
        with pytest.raises(CheckpointError):
            tokenizer_from_json(text)


def test_round_trip_of_any_bytes_or_a_data_error() -> None:
    generator = random.Random(0)
    for case in range(CASES):
        tokenizer = EXAMPLES[case % len(EXAMPLES)]
        data = b"".join(generator.choices(PARTS, k=generator.randrange(8)))
        try:
            ids = tokenizer.encode(data)
        except DataError:
            assert tokenizer.kind != "bytes"
            continue
        assert ids.dtype == tokenizer.dtype
        decoded = tokenizer.decode_bytes(ids)
        if tokenizer.kind == "words":
            assert np.array_equal(tokenizer.encode(decoded), ids)
        else:
            assert decoded == (data.replace(b"\n", b"") if tokenizer.unit == "byte" and tokenizer.size == 3 else data)


@pytest.mark.parametrize("tokenizer", EXAMPLES, ids=lambda t: f"{t.kind}-{t.size}")
@pytest.mark.parametrize("word", [b"a", b"a a "], ids=["one-word", "words"])
def test_a_long_line_takes_linear_time_and_constant_memory(tokenizer: Tokenizer, word: bytes, tmp_path: Path) -> None:
    if tokenizer.size == 3 and b" " in word:
        pytest.skip("its alphabet has no space")
    megabytes = 64 if os.environ.get("LONGSPAN_TORTURE") else 16
    path = tmp_path / "line"

    def seconds(size: int) -> float:
        path.write_bytes(word * (size // len(word)))
        best = float("inf")
        for _ in range(2):
            begin = time.process_time()
            tokens = sum(len(ids) for ids in tokenizer.encode_chunks(path))
            best = min(best, time.process_time() - begin)
        ends = 2 if word == b"a" else size // 2 + 1
        assert tokens == (ends if tokenizer.kind == "words" else size)
        return best

    quarter, full = seconds(megabytes << 18), seconds(megabytes << 20)
    assert full < 12 * quarter + 0.2
    tracemalloc.start()
    for _ in tokenizer.encode_chunks(path):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A single long word must be in memory to be looked up. Nothing else grows with the line.
    held = megabytes << 20 if tokenizer.kind == "words" and word == b"a" else 0
    assert peak < (100 << 20) + 3 * held


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for tokenizer in EXAMPLES:
        with pytest.raises(DataError, match="/none"):
            list(tokenizer.encode_chunks(tmp_path / "none"))
        with pytest.raises(DataError, match=r"Is a directory"):
            list(tokenizer.encode_chunks(tmp_path))


def test_an_empty_file_has_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for tokenizer in EXAMPLES:
        assert sum(len(ids) for ids in tokenizer.encode_chunks(tmp_path / "empty")) == 0
        assert len(tokenizer.encode("")) == 0
