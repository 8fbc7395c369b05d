"""Figures draw the measured values and are saved as PNG and SVG."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from longspan.experiments.figures.attention import AttentionByDistance
from longspan.experiments.figures.attention_figures import (
    draw_attention,
    draw_head,
    draw_spans,
    draw_terms,
    top_share,
    widest_heads,
)
from longspan.experiments.figures.attention_sample import AttentionSample, label, sample_attention, wrap
from longspan.experiments.figures.context_figures import draw_gains, draw_perplexity
from longspan.experiments.figures.drawing import line_style, printable
from longspan.scoring.loss_table import LossTable
from longspan.tokenizers import ByteTokenizer
from tests.support import build

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
    """The names of the figures in a folder, each saved as PNG, SVG and PDF."""
    names = {path.stem for path in folder.iterdir()}
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
        assert "<svg" in (folder / f"{name}.svg").read_text()
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    return names


def test_every_figure_is_saved(found: AttentionByDistance, tmp_path: Path) -> None:
    draw_attention(found, tmp_path)
    draw_terms(found, tmp_path)
    draw_spans(found, tmp_path)
    table = LossTable(("a", "b"), (10, 20, 30), np.random.default_rng(0).gamma(2.0, 1.0, (2, 3, 50)))
    draw_gains(table, {"0.1": 0.1, "1.0": 1.0}, 0.01, tmp_path)
    draw_perplexity(table, tmp_path)
    assert drawn(tmp_path) == {"figure3", "figure4", "figure5", "figure7", "spans"}


def test_every_model_has_its_name_and_a_line_style_of_its_own(tmp_path: Path) -> None:
    """matplotlib starts a formula at $, hides names that start with _, and warns about unknown characters."""
    names = ("_first", r"$\frac$ 5$", "猫", "a" * 99, *"bcdefghi")
    table = LossTable(names, (10, 20, 30), np.random.default_rng(0).gamma(2.0, 1.0, (len(names), 3, 50)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_gains(table, {"0.1": 0.1, "1.0": 1.0}, 0.01, tmp_path)
        draw_perplexity(table, tmp_path)
    for name in ("figure3", "figure4"):
        comments = set(re.findall("<!-- (.*?) -->", (tmp_path / f"{name}.svg").read_text()))
        assert comments >= {" _first", r"$\frac$ 5$", "·", "a" * 24 + "…" + "a" * 23, *"bcdefghi"}
    lines = [line_style(n) for n in range(20)]
    assert len({(str(one["linestyle"]), one["marker"]) for one in lines}) == 20


def test_gains_without_a_better_perplexity_have_open_markers(tmp_path: Path) -> None:
    """Losses rise for half of the targets and fall for the others: the minimum gains, perplexity does not."""
    same = np.array([[1.0, 2.0] * 5, [2.0, 1.0] * 5, [1.0, 0.5] * 5])
    for name, losses in (("open", same), ("closed", same[[0, 2, 2]] * [[1], [1], [0.9]])):
        (tmp_path / name).mkdir()
        draw_gains(LossTable(("m",), (10, 20, 30), losses[None]), {"1.0": 1.0}, 0.01, tmp_path / name)
    count = {name: (tmp_path / name / "figure3.svg").read_text().count("fill: #ffffff") for name in ("open", "closed")}
    assert count["open"] == count["closed"] + 1


def test_the_same_figure_gives_the_same_file(found: AttentionByDistance, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        draw_spans(found, tmp_path / name)
    assert (tmp_path / "one/spans.svg").read_bytes() == (tmp_path / "two/spans.svg").read_bytes()


@pytest.mark.parametrize("family", ["transformer-xl", "vanilla"])
def test_a_head_with_its_text(family: str, tmp_path: Path) -> None:
    net = build(family, SMALL | ({"memory": 20} if family == "transformer-xl" else {})).eval()
    text = "A naïve cat: 猫\tand\n more.\x00 And again. And again.".encode() * 3
    sample = sample_attention(net, np.frombuffer(text, np.uint8), ByteTokenizer(), 6)
    assert sample.attention.shape[:3] == (2, 2, 6)
    assert len(sample.targets) == 6
    for row in range(6):
        np.testing.assert_allclose(sample.attention[:, :, row, : sample.visible[row]].sum(axis=-1), 1, atol=1e-5)
    assert "".join(sample.context(-1)).encode() in text.decode().encode() or "�" in "".join(sample.tokens)
    draw_head(sample, 1, 0, "figure6-1", tmp_path)
    assert drawn(tmp_path) == {"figure6-1"}


def test_context_of_a_target() -> None:
    sample = AttentionSample(np.ones((1, 1, 2, 3), np.float32), np.array([2, 3]), tuple("abcde"))
    assert sample.targets == ("d", "e")
    assert sample.context(0) == ("b", "c")
    assert sample.context(1) == sample.context(-1) == ("b", "c", "d")


def test_top_share_of_the_visible_columns() -> None:
    weights = np.array([[0.5, 0.1, 0.2, 0.1, 0.1, 9.0, 9.0], [0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.3]])
    marks = top_share(weights, np.array([5, 7]), 0.3)
    assert np.argwhere(marks).tolist() == [[0, 0], [0, 2], [1, 1], [1, 6]]
    assert top_share(weights, np.array([1, 1]), 0.2).sum() == 2


def test_widest_heads() -> None:
    attention = np.zeros((2, 2, 10))
    for head, far in zip(np.ndindex(2, 2), (1, 9, 4, 6), strict=True):
        attention[(*head, far)] = 1.0
    assert widest_heads(AttentionByDistance(attention, {}, 1, np.ones(10)), 3) == [(0, 1), (1, 1), (1, 0)]


def test_printable_text_and_lines() -> None:
    assert printable("a\tb\n\x00猫é") == "a→b↵··é"
    assert label("  ") == "␣␣"
    assert label("") == "·"
    marks = np.array([True, False, False, True])
    assert wrap(["ab", "c", "de", "f"], marks, 4) == [[("ab", True), ("cd", False)], [("e", False), ("f", True)]]
