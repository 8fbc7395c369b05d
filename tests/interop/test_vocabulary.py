"""The vocab.pkl of `transformers`, read without executing it: the ids are those of `transformers`."""

import json
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import CheckpointError, LongspanError
from longspan.interop.vocabulary import read_vocabulary
from tests.interop.test_pickles import mutated

FIXTURES = Path(__file__).parent.parent / "parity" / "fixtures" / "vocabulary"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
SPLIT = 3  # the first texts; whitespace splits them as Moses does


def saved(folder: Path, **changes: Any) -> Path:
    words = ["<eos>", "<unk>", "a", "b"]
    indices = OrderedDict((word, k) for k, word in enumerate(words))
    values = {"idx2sym": words, "sym2idx": indices, "lower_case": False, "delimiter": None, "unk_idx": 1} | changes
    (folder / "vocab.pkl").write_bytes(pickle.dumps(values))
    return folder / "vocab.pkl"


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_ids_are_those_of_transformers(kind: str) -> None:
    tokenizer = read_vocabulary(FIXTURES / f"{kind}-vocab.pkl", 16)
    assert tokenizer.size == 16
    assert tokenizer.lower == (kind == "lower")
    texts, tokens, ids = (EXPECTED[kind][key] for key in ("texts", "tokens", "ids"))
    for text, split, expected in zip(texts, tokens, ids, strict=True):
        assert tokenizer.encode_prompt(" ".join(split)).tolist() == expected
        assert tokenizer.encode(" ".join(split)).tolist() == [*expected, 0], "our lines end with <eos>"
        assert (tokenizer.encode_prompt(text).tolist() == expected) == (texts.index(text) < SPLIT)


def test_an_added_token_is_left_out_if_the_model_does_not_have_it() -> None:
    tokenizer = read_vocabulary(FIXTURES / "lower-vocab.pkl", 15)
    assert (tokenizer.size, tokenizer.words[-1]) == (15, "café")
    assert read_vocabulary(FIXTURES / "lower-vocab.pkl").size == 15


@pytest.mark.parametrize(
    "changes",
    [
        {"idx2sym": None},
        {"idx2sym": ["<unk>", 3]},
        {"idx2sym": [], "sym2idx": OrderedDict()},
        {"sym2idx": OrderedDict(a=0)},
        {"sym2idx": None},
        {"lower_case": "yes"},
        {"delimiter": ""},
        {"unk_idx": 2},
        {"unk_idx": "1"},
        {"idx2sym": ["<unk>", "a b"], "sym2idx": OrderedDict({"<unk>": 0, "a b": 1}), "unk_idx": 0},
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_vocabulary(saved(tmp_path)).words == ("<eos>", "<unk>", "a", "b")
    with pytest.raises(CheckpointError, match=r"vocab\.pkl"):
        read_vocabulary(saved(tmp_path, **changes))


def test_added_tokens_with_a_gap_are_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path, _added_tokens_encoder={"<x>": 5, "<eos>": 0})
    assert read_vocabulary(path, 5).size == 4


@pytest.mark.parametrize("content", [b"", b"\x80", pickle.dumps(5), pickle.dumps([1]), b"hello\n", b"PK\x03\x04"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vocab.pkl").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"vocab\.pkl"):
        read_vocabulary(tmp_path / "vocab.pkl")


def test_mutated_vocabularies(tmp_path: Path, trials: Callable[[int, int], int]) -> None:
    choose, content = random.Random(0), (FIXTURES / "cased-vocab.pkl").read_bytes()
    refused: list[str] = []
    for _ in range(trials(15, 5000)):
        (tmp_path / "x").write_bytes(mutated(content, choose))
        try:
            read_vocabulary(tmp_path / "x", 16)
        except LongspanError as error:
            refused.append(str(error))
    assert refused
    assert not any("\n" in message for message in refused)
