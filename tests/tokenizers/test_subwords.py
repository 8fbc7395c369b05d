"""Subword tokenizers, compared with the `tokenizers` library, and their exact round trip."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizers
from longspan.errors import CheckpointError, ConfigError, DataError, DataWarning, UnknownNameError
from longspan.tokenizers import SubwordTokenizer, read_tokenizer, subwords, tokenizer_from_dict
from longspan.tokenizers.train_subwords import train_subwords
from tests.conftest import TRIES

TEXT = "".join(
    random.Random(0).choices(["the river ", "a town's ", "naïve, ", "猫 ", "\n", "x = 1\n", "  ", "rivers\n\n"], k=4000)
)
KINDS = [("bpe", False), ("unigram", False), ("wordpiece", False), ("bpe", True), ("unigram", True)]
# What looks like a marker of one of these tokenizers.
TRICKY = [
    "<unk>",
    "<0x41>",
    "##a",
    "\u2026a",
    "\u2581",
    "Ġthe",
    "<|end|>",
    "\0",
    "\ufeff",
    "\r\n",
    "\u00a0",
    "'s",
    "  ",
]


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, bool], SubwordTokenizer]:
    return {
        (kind, fallback): train_subwords([TEXT], 700, kind, byte_fallback=fallback, document_end="<|end|>")
        for kind, fallback in KINDS
    }


@settings(max_examples=20 * TRIES)
@given(st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=8)), max_size=12).map("".join))
def test_the_round_trip_is_exact(trained: dict[tuple[str, bool], SubwordTokenizer], text: str) -> None:
    for tokenizer in trained.values():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        half = len(ids) // 2
        assert tokenizer.decode_bytes(ids[:half]) + tokenizer.decode_bytes(ids[half:]) == text.encode()
        assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(
    kind: tuple[str, bool], trained: dict[tuple[str, bool], SubwordTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a text is encoded in many segments, given in blocks that cut characters."""
    tokenizer = trained[kind]
    library = tokenizers.Tokenizer.from_str(tokenizer.definition)
    expected = library.encode(TEXT, add_special_tokens=False).ids
    monkeypatch.setattr(subwords, "_SEGMENT", 50)
    monkeypatch.setattr(subwords, "_LONGEST", 400)
    data = TEXT.encode()
    blocks = [data[k : k + 37] for k in range(0, len(data), 37)]
    assert [k for ids in tokenizer.encode_stream(blocks) for k in ids] == expected
    assert library.decode(expected) == TEXT
    assert tokenizer.size == library.get_vocab_size() <= 700
    assert len(expected) < len(data)


@given(st.text(st.sampled_from("ab \n"), max_size=80), st.integers(1, 9))
def test_segments_do_not_depend_on_blocks(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subwords, "_SEGMENT", 4)
        patch.setattr(subwords, "_LONGEST", 9)
        whole = list(subwords.segments([text]))
        assert list(subwords.segments(text[k : k + size] for k in range(0, len(text), size))) == whole
    assert "".join(whole) == text
    assert all(len(segment) <= 9 for segment in whole)


def test_special_tokens_are_never_divided() -> None:
    tokenizer = train_subwords([TEXT], 300, special=["<|user|>", "<|bot|>"], document_end="<|end|>")
    ids = tokenizer.encode("<|user|>the<|bot|><|end|>").tolist()
    assert (ids[0], ids[-2], ids[-1]) == (0, 1, 2)
    assert (tokenizer.document_end_id, tokenizer.size) == (2, 300)


def test_folders_and_files_are_read(tmp_path: Path) -> None:
    trained = train_subwords([TEXT], 400, document_end="<|end|>")
    trained.save(tmp_path / "own")
    assert read_tokenizer(tmp_path / "own") == read_tokenizer(tmp_path / "own" / "tokenizer.json") == trained
    (tmp_path / "own" / "tokenizer_config.json").unlink()
    assert read_tokenizer(tmp_path / "own").document_end_id is None
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.warns(DataWarning, match=r"tokenizer_config\.json .*'</s>'"):
        assert read_tokenizer(tmp_path / "own").document_end_id is None
    (tmp_path / "own" / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        read_tokenizer(tmp_path / "own")
    (tmp_path / "stored.json").write_text(json.dumps(trained.to_dict()))
    assert read_tokenizer(tmp_path / "stored.json") == trained
    (tmp_path / "words.txt").write_text("<eos> 9\nthe 3\n")
    assert read_tokenizer(tmp_path / "words.txt").size == 2
    for content in ("{", "[]", '{"model": 1}', '{"kind": "bytes"}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(DataError, match=r"bad\.json"):
            read_tokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match="none"):
        read_tokenizer(tmp_path / "none" / "tokenizer.json")


def test_the_unknown_token_of_every_model() -> None:
    models = tokenizers.models
    tokens = {"a": 0, "?": 1}
    for model, unknown in (
        (models.BPE(tokens, [], unk_token="?"), 1),
        (models.BPE(tokens, []), None),
        (models.WordPiece(tokens, unk_token="?"), 1),
        (models.Unigram([("a", -1.0), ("?", -1.0)], 1), 1),
        (models.Unigram([("a", -1.0)]), None),
    ):
        assert SubwordTokenizer(tokenizers.Tokenizer(model).to_str()).unknown == unknown


def test_a_stored_tokenizer_is_checked() -> None:
    trained = train_subwords([TEXT], 300)
    values = trained.to_dict()
    assert tokenizer_from_dict(values) == trained
    changes: list[dict[str, Any]] = [
        {"tokenizer": {}},
        {"tokenizer": "x"},
        {"document_end": "missing"},
        {"document_end": 1},
        {"tokenizer": {**values["tokenizer"], "model": {"type": "BPE", "vocab": {}, "merges": []}}},
    ]
    for change in changes:
        with pytest.raises(CheckpointError):
            tokenizer_from_dict(values | change)


def test_settings_are_checked() -> None:
    with pytest.raises(UnknownNameError, match="bqe"):
        train_subwords([TEXT], 700, "bqe")
    with pytest.raises(ConfigError, match="513"):
        train_subwords([TEXT], 400, "wordpiece", special=["<|a|>"])
    with pytest.raises(ConfigError, match="wordpiece"):
        train_subwords([TEXT], 700, "wordpiece", byte_fallback=True)
    with pytest.raises(ConfigError, match="'a'"):
        train_subwords([TEXT], 700, special=["a"])
    with pytest.raises(DataError, match="empty"):
        train_subwords([""], 700)


def test_other_decoders(tmp_path: Path) -> None:
    """A tokenizer in the style of Llama: a space before the text, bytes for unknown characters."""
    vocabulary = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3, "<0xC3>": 4, "<0xA9>": 5}
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>")
    )
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = SubwordTokenizer(library.to_str())
    assert tokenizer.encode("a aé").tolist() == [3, 3, 4, 5]
    assert tokenizer.decode([3, 3, 4, 5]) == " a aé"
    assert library.decode([3, 3, 4, 5]) == "a aé"
    _, offsets = tokenizer.encode_with_offsets("a aé")
    # The added space is not in the text, so characters of the library are used: both bytes of é are the whole é.
    assert offsets.tolist() == [[0, 1], [1, 3], [3, 5], [3, 5]]


def test_offsets_of_lossless_tokens_are_exact_bytes(trained: dict[tuple[str, bool], SubwordTokenizer]) -> None:
    data = "a town's naïve, 猫\n\nżrivers 😀".encode()
    for tokenizer in trained.values():
        ids, offsets = tokenizer.encode_with_offsets(data)
        pieces = [data[first:last] for first, last in offsets]
        assert b"".join(pieces) == data
        assert pieces == [tokenizer.decode_bytes([token]) for token in ids]
