"""Input transformations against inputs built by hand."""

import numpy as np
import pytest

from longspan.reading import Reading
from longspan.text_model import TextModel
from longspan.tokenizers.train_subwords import train_subwords
from longspan.transfer.formats import Format, shorten
from longspan.transfer.tasks import Example


class Stub:
    """What a format needs to know about a model."""

    def __init__(self, *, causal: bool = True, first: bool = False, memory: bool = True, segment: int = 16) -> None:
        self.causal, self.classify_at = causal, "first" if first else "last"
        self.reading = Reading(segment=segment)
        self.has_memory = lambda: memory


SPECIAL = ("<|start|>", "<|separator|>", "<|extract|>")


@pytest.fixture(scope="module")
def tokenizer():
    return train_subwords(["one two three"], 300, special=SPECIAL)


def shown(tokenizer, ids) -> str:
    return tokenizer.decode(ids).replace("<|", "<").replace("|>", ">")


def test_gpt(tokenizer) -> None:
    def rows(kind: str, *texts: str, label: object = None, symmetric: bool = False) -> list[str]:
        made = Format(tokenizer, kind, ["no", "yes"], Stub(), symmetric=symmetric)
        encoded = made.encode([Example(texts, label)])[0]
        return [shown(tokenizer, row) for row in encoded.rows]

    assert rows("single", "one") == ["<start>one<extract>"]
    assert rows("pair", "one", "two") == ["<start>one<separator>two<extract>"]
    both = ["<start>one<separator>two<extract>", "<start>two<separator>one<extract>"]
    assert rows("similarity", "one", "two") == rows("pair", "one", "two", symmetric=True) == both
    assert rows("choice", "one", "two", "three") == [both[0], "<start>one<separator>three<extract>"]


def test_bert_and_xlnet(tokenizer) -> None:
    pair = [Example(("one", "two"))]
    (bert,) = Format(tokenizer, "similarity", [], Stub(causal=False, first=True)).encode(pair)
    assert [shown(tokenizer, row) for row in bert.rows] == ["<extract>one<separator>two<separator>"]
    (xlnet,) = Format(tokenizer, "pair", ["a"], Stub(causal=False)).encode(pair)
    assert shown(tokenizer, xlnet.rows[0]) == "one<separator>two<separator><extract>"


def test_targets(tokenizer) -> None:
    def target(kind: str, label: object, *texts: str) -> tuple[int, ...]:
        return Format(tokenizer, kind, ["no", "yes"], Stub()).encode([Example(texts or ("a", "b"), label)])[0].targets

    assert target("pair", "yes") == (1,)
    assert target("similarity", 3.8) == (3_800_000,)
    assert target("choice", 1) == (1,)
    assert target("tags", ("yes", "no")) == (1, 0)


def test_tags_are_read_where_their_word_is_complete(model: TextModel) -> None:
    example = Example(("ab", "c"), ("x", "y"))
    (causal,) = Format(model.tokenizer, "tags", ["x", "y"], model.model).encode([example])
    assert model.tokenizer.decode(causal.rows[0]) == " ab c\n ab c\n"
    # The second copy: the last byte of each word.
    assert [chr(causal.rows[0][k]) for k in causal.marks] == ["b", "c"]
    assert causal.marks.tolist() == [8, 10]
    (both,) = Format(model.tokenizer, "tags", ["x", "y"], Stub(causal=False)).encode([example])
    assert both.marks.tolist() == [0, 3]


def test_long_texts_keep_their_beginning_and_end() -> None:
    (kept,) = shorten([np.arange(100)], 8)
    assert kept.tolist() == [0, 1, 94, 95, 96, 97, 98, 99]
    a, b, c = shorten([np.arange(100), np.arange(50), np.arange(3)], 13)
    assert [len(a), len(b), len(c)] == [5, 5, 3]
    assert [len(x) for x in shorten([np.arange(4), np.arange(4)], 20)] == [4, 4]


def test_a_model_without_memory_reads_one_segment(tokenizer) -> None:
    layout = Format(tokenizer, "pair", ["a"], Stub(memory=False, segment=12))
    (row,) = layout.encode([Example(("one " * 50, "two"))])[0].rows
    assert len(row) == 12


def test_a_backward_model_reads_texts_from_their_end(model: TextModel) -> None:
    layout = Format(model.tokenizer, "pair", ["a"], model.model, reverse=True)
    (row,) = layout.encode([Example(("abc", "de"))])[0].rows
    assert model.tokenizer.decode(row) == "cba\ned\n"
    layout = Format(model.tokenizer, "single", ["a"], model.model, 9, reverse=True)
    (row,) = layout.encode([Example(("abcdefghijklmnop",))])[0].rows
    assert model.tokenizer.decode(row) == "ponmlkba\n"  # shortened as for a forward model
