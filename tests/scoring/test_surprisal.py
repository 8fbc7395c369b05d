"""Surprisal by token, word, line and document: sums equal `score`, and offsets find the text."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.api import create
from longspan.errors import ConfigError, DataError
from longspan.scoring.batches import losses_of_texts
from longspan.scoring.surprisal import COLUMNS, Per, surprisal
from longspan.scoring.surprisal_files import format_of, surprisals, table_writer
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, WordTokenizer

TEXTS = ["Naïve  猫,\r\n it was so.\n\nlast line", "a", "", "b\n" * 9, "It was so. " * 12, "\n\nend \n", " \t ", "x y"]
ALPHABET = "".join(sorted(set("".join(TEXTS))))
WORDS = ("<eos>", "<unk>", "it", "was", "so.", "a", "猫,")
PER: tuple[Per, ...] = ("token", "word", "line", "document")


def model_of(tokenizer: Tokenizer, family: str = "transformer-xl", **reading: Any) -> TextModel:
    sizes = {"layers": 1, "width": 16} | ({} if family == "lstm" else {"heads": 2})
    model = create(family, sizes, tokenizer, reading={"segment": 7, **reading}, seed=1)
    for parameter in model.parameters():  # far from uniform
        parameter.data.mul_(4)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, TextModel]:
    return {
        "bytes": model_of(ByteTokenizer(), memory=5),
        "plain": model_of(ByteTokenizer(plain=True), memory=5),
        "characters": model_of(CharacterTokenizer(ALPHABET.replace("\r", ""), dropped="\r"), memory=5),
        "words": model_of(WordTokenizer(WORDS, lower=True), memory=5),
        "lines": model_of(WordTokenizer(("<S>", "<unk>", "was"), boundary="<S>"), "lstm"),
        "window": model_of(ByteTokenizer(), "vanilla"),
    }


@pytest.mark.parametrize("name", ["bytes", "plain", "characters", "words", "lines", "window"])
def test_sums_equal_the_score(models: dict[str, TextModel], name: str) -> None:
    """In batches of three texts with different lengths, against one text at a time."""
    model = models[name]
    for per in PER:
        found = model.surprisal(TEXTS, per, batch=3)
        for text, one in zip(TEXTS, found, strict=True):
            ids = model.tokenizer.encode(text)
            bits = 0.0 if len(ids) < 2 else model.score(text).bits * (len(ids) - 1)
            assert math.isclose(float(np.nansum(one.bits)), bits, rel_tol=1e-5, abs_tol=1e-9), (per, text)
            assert one.tokens.sum() == max(len(ids) - 1, 0)
            assert np.isnan(one.bits).tolist() == (one.tokens == 0).tolist()


@pytest.mark.parametrize("name", ["bytes", "plain", "characters", "words", "lines"])
def test_offsets_find_the_text_of_a_token(models: dict[str, TextModel], name: str) -> None:
    tokenizer = models[name].tokenizer
    for text in TEXTS:
        data = text.encode()
        ids, offsets = tokenizer.encode_with_offsets(data)
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert (np.diff(offsets.reshape(-1)) >= 0).all()
        gaps, end = b"", 0
        for token, (first, last) in zip(ids, offsets.tolist(), strict=True):
            gaps, end = gaps + data[end:first], last
            piece, decoded = data[first:last].decode("utf-8", "replace"), tokenizer.decode([token])
            if isinstance(tokenizer, WordTokenizer):
                word = tokenizer.words[token]
                expected = {"<eos>": ("\n", "\r\n", ""), "<S>": ("\n", "\r\n", ""), "<unk>": (piece,)}
                assert piece in expected.get(word, (piece,))
                assert word == "<unk>" or piece.strip().lower() == decoded.strip()
            else:
                assert piece == decoded
        dropped = (gaps + data[end:]).decode()
        assert dropped.strip() == "" if isinstance(tokenizer, WordTokenizer) else set(dropped) <= {"\r"}


def test_words_and_lines_are_those_of_the_text() -> None:
    """`str.split` and lines that end in LF or CRLF are the truth, and characters are those of the string."""
    model = model_of(ByteTokenizer(), memory=5)
    for text in TEXTS:
        words, lines = (list(model.surprisal(text, per).rows()) for per in ("word", "line"))
        for rows, expected in (
            (words, text.split()),
            (lines, text.replace("\r\n", "\n").removesuffix("\n").split("\n")),
        ):
            if expected and text.strip():
                assert [row["text"] for row in rows] == expected
            for row in rows:
                assert row["text"] == text[row["char_start"] : row["char_end"]]
                assert row["text"].encode() == text.encode()[row["byte_start"] : row["byte_end"]]


def test_a_token_counts_towards_one_unit() -> None:
    """By hand: tokens `ab`, ` c`, `d\\n`, `e` of the text `ab cd\\ne`, each with one bit but the first."""
    offsets = np.array([[0, 2], [2, 4], [4, 6], [6, 7]])
    losses = np.full(3, math.log(2), np.float32)
    found = {per: surprisal(b"ab cd\ne", offsets, losses, per) for per in PER}
    bits = {per: one.bits.round(5).tolist() for per, one in found.items()}
    # `d\n` ends after the word `cd`, so it counts towards the next word, like any whitespace before a word.
    assert str(bits["word"]) == "[nan, 1.0, 2.0]"
    assert bits["line"] == [2.0, 1.0]
    assert bits["document"] == [3.0]
    assert found["word"].byte_spans.tolist() == [[0, 2], [3, 5], [6, 7]]
    assert found["line"].byte_spans.tolist() == [[0, 5], [6, 7]]


def test_half_a_character_and_bytes_that_are_not_utf8() -> None:
    model = model_of(ByteTokenizer(), memory=5)
    rows = list(model.surprisal("é".encode() + b"\xffz").rows())
    assert [(row["char_start"], row["char_end"], row["text"]) for row in rows] == [
        (0, 1, "\\xc3"),
        (0, 1, "\\xa9"),
        (1, 2, "\\xff"),
        (2, 3, "z"),
    ]


def test_every_format_holds_the_same_rows(models: dict[str, TextModel], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    model, named = models["bytes"], [(f"{k}.txt", text.encode()) for k, text in enumerate(TEXTS)]
    tables: dict[str, list[dict[str, Any]]] = {}
    for kind in ("csv", "jsonl", "parquet"):
        path = tmp_path / kind
        with path.open("wb") as file:
            table = table_writer(kind, file)
            for name, found in surprisals(model.model, model.tokenizer, named, "word"):
                table.add(name, found)
            table.close()
        text = path.read_bytes()
        if kind == "csv":
            tables[kind] = list(csv.DictReader(io.StringIO(text.decode(), newline="")))
        elif kind == "jsonl":
            tables[kind] = [json.loads(line) for line in text.decode().split("\n")[:-1]]
        else:
            tables[kind] = parquet.read_table(io.BytesIO(text)).to_pylist()
    assert list(tables["jsonl"][0]) == ["file", *COLUMNS]
    assert tables["jsonl"] == tables["parquet"]
    as_text = [{k: "" if v is None else str(v) for k, v in row.items()} for row in tables["jsonl"]]
    assert tables["csv"] == as_text
    assert len({row["file"] for row in tables["csv"]}) == len(TEXTS)


def test_batches_use_the_reading_and_check_their_size(models: dict[str, TextModel]) -> None:
    model = models["bytes"]
    ids = [model.tokenizer.encode(TEXTS[0]), model.tokenizer.encode(TEXTS[4])]
    seen: list[tuple[int, int]] = []
    reading = model.reading_with(memory=30)
    found = losses_of_texts(model.model, ids, reading, batch=2, progress=lambda *done: seen.append(done))
    expected = model.score(TEXTS[0], memory=30).losses
    assert expected is not None
    torch.testing.assert_close(torch.from_numpy(found[0]), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
    total = sum(len(one) - 1 for one in ids)
    assert seen[-1] == (total, total)
    with pytest.raises(ConfigError, match="batch=0"):
        losses_of_texts(model.model, ids, batch=0)


def test_formats_and_errors(models: dict[str, TextModel]) -> None:
    assert format_of(Path("a.jsonl"), None) == "jsonl"
    assert format_of(Path("a.x"), "parquet") == "parquet"
    with pytest.raises(ConfigError, match=r"a\.x"):
        format_of(Path("a.x"), None)
    with pytest.raises(ConfigError, match="cvs"):
        format_of(None, "cvs")
    with pytest.raises(DataError, match="the text"):
        models["characters"].surprisal("$")
