"""Pictures: what is drawn is what was measured, and every one is there as PNG and SVG."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from longspan.analysis.attention import AttentionByDistance
from longspan.analysis.attention_figures import (
    draw_attention,
    draw_spans,
    draw_terms,
    draw_wide_head,
    top_share,
    widest_heads,
)
from longspan.analysis.context_figures import draw_gains, draw_perplexity
from longspan.analysis.drawing import line
from longspan.analysis.passages import Passage, label, lay_out, readable, take_passage
from longspan.evaluation.loss_table import LossTable
from longspan.models.families import build
from longspan.tokens import ByteTokenizer

SMALL = {"layers": 2, "width": 16, "heads": 2, "inner": 16, "segment": 8, "dropout": 0.0}
PNG = b"\x89PNG\r\n"


@pytest.fixture
def found() -> AttentionByDistance:
    random = np.random.default_rng(0)
    attention = random.dirichlet(np.full(30, 0.3), (3, 2))
    return AttentionByDistance(
        attention, {term: random.dirichlet(np.ones(30), (3, 2)) for term in "abcd"}, 1000, np.ones(30)
    )


def drawn(folder: Path) -> set[str]:
    """The names of the pictures in a folder, each of them a PNG and an SVG that name their axes."""
    names = {path.stem for path in folder.iterdir()}
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
        assert "<svg" in (folder / f"{name}.svg").read_text()
    return names


def test_every_picture_is_there(found: AttentionByDistance, tmp_path: Path) -> None:
    draw_attention(found, tmp_path)
    draw_terms(found, tmp_path)
    draw_spans(found, tmp_path)
    table = LossTable(("a", "b"), (10, 20, 30), np.random.default_rng(0).gamma(2.0, 1.0, (2, 3, 50)))
    draw_gains(table, {"0.1": 0.1, "1.0": 1.0}, 0.01, tmp_path)
    draw_perplexity(table, tmp_path)
    assert drawn(tmp_path) == {"figure3", "figure4", "figure5", "figure7", "spans"}


def test_every_model_has_its_name_and_its_own_line(tmp_path: Path) -> None:
    """matplotlib takes $ for a formula, leaves names that begin with _ out of legends, and warns of unknown signs."""
    names = ("_first", r"$\frac$ 5$", "猫", "a" * 99, *"bcdefghi")
    table = LossTable(names, (10, 20, 30), np.random.default_rng(0).gamma(2.0, 1.0, (len(names), 3, 50)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_gains(table, {"0.1": 0.1, "1.0": 1.0}, 0.01, tmp_path)
        draw_perplexity(table, tmp_path)
    for name in ("figure3", "figure4"):
        comments = set(re.findall("<!-- (.*?) -->", (tmp_path / f"{name}.svg").read_text()))
        assert comments >= {" _first", r"$\frac$ 5$", "·", "a" * 24 + "…" + "a" * 23, *"bcdefghi"}
    lines = [line(n) for n in range(20)]
    assert len({(str(one["linestyle"]), one["marker"]) for one in lines}) == 20


def test_gains_without_a_better_perplexity_are_left_open(tmp_path: Path) -> None:
    """Losses that go up for some targets and down for as many: the better of both is a gain, perplexity stays."""
    same = np.array([[1.0, 2.0] * 5, [2.0, 1.0] * 5, [1.0, 0.5] * 5])
    for name, losses in (("open", same), ("closed", same[[0, 2, 2]] * [[1], [1], [0.9]])):
        (tmp_path / name).mkdir()
        draw_gains(LossTable(("m",), (10, 20, 30), losses[None]), {"1.0": 1.0}, 0.01, tmp_path / name)
    count = {name: (tmp_path / name / "figure3.svg").read_text().count("fill: #ffffff") for name in ("open", "closed")}
    assert count["open"] == count["closed"] + 1


def test_the_same_picture_is_the_same_file(found: AttentionByDistance, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        draw_spans(found, tmp_path / name)
    assert (tmp_path / "one/spans.svg").read_bytes() == (tmp_path / "two/spans.svg").read_bytes()


@pytest.mark.parametrize("family", ["transformer-xl", "vanilla"])
def test_a_wide_head_with_its_text(family: str, tmp_path: Path) -> None:
    net = build(family, SMALL | ({"memory": 20} if family == "transformer-xl" else {})).eval()
    text = "A naïve cat: 猫\tand\n more.\x00 And again. And again.".encode() * 3
    passage = take_passage(net, np.frombuffer(text, np.uint8), ByteTokenizer(), 6)
    assert passage.attention.shape[:3] == (2, 2, 6)
    assert len(passage.targets) == 6
    for row in range(6):
        np.testing.assert_allclose(passage.attention[:, :, row, : passage.seen[row]].sum(axis=-1), 1, atol=1e-5)
    assert "".join(passage.memory_of(-1)).encode() in text.decode().encode() or "�" in "".join(passage.tokens)
    draw_wide_head(passage, 1, 0, "figure6-1", tmp_path)
    assert drawn(tmp_path) == {"figure6-1"}


def test_memory_of_a_target() -> None:
    passage = Passage(np.ones((1, 1, 2, 3), np.float32), np.array([2, 3]), tuple("abcde"))
    assert passage.targets == ("d", "e")
    assert passage.memory_of(0) == ("b", "c")
    assert passage.memory_of(1) == passage.memory_of(-1) == ("b", "c", "d")


def test_the_largest_fifth_of_what_is_seen() -> None:
    weights = np.array([[0.5, 0.1, 0.2, 0.1, 0.1, 9.0, 9.0], [0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.3]])
    marks = top_share(weights, np.array([5, 7]), 0.3)
    assert np.argwhere(marks).tolist() == [[0, 0], [0, 2], [1, 1], [1, 6]]
    assert top_share(weights, np.array([1, 1]), 0.2).sum() == 2


def test_the_widest_heads() -> None:
    attention = np.zeros((2, 2, 10))
    for head, far in zip(np.ndindex(2, 2), (1, 9, 4, 6), strict=True):
        attention[(*head, far)] = 1.0
    assert widest_heads(AttentionByDistance(attention, {}, 1, np.ones(10)), 3) == [(0, 1), (1, 1), (1, 0)]


def test_text_to_read_along() -> None:
    assert readable("a\tb\n\x00猫é") == "a→b↵··é"
    assert label("  ") == "␣␣"
    assert label("") == "·"
    marks = np.array([True, False, False, True])
    assert lay_out(["ab", "c", "de", "f"], marks, 4) == [[("ab", True), ("cd", False)], [("e", False), ("f", True)]]
