"""The report: one file with everything in it, also when something is missing."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.analysis import published
from longspan.analysis.page import Section, page, table
from longspan.analysis.published import Published
from longspan.analysis.report import Effort, build_report
from longspan.analysis.runs import read_run
from longspan.errors import DataError

SMALL = Effort(scored=200, slid=20, targets=10, longest=50, looked=200, written=20)


def report(*folders: Path) -> str:
    scratch = folders[0].parent / "scratch"
    scratch.mkdir()
    return build_report([read_run(folder) for folder in folders], scratch, torch.device("cpu"), torch.float32, SMALL)


def test_every_part_is_there(make_run: Callable[..., Path]) -> None:
    html = report(make_run("xl", memory=20), make_run("window", "vanilla"))
    assert re.findall("<h2>(.*?)</h2>", html) == [
        "Runs",
        "Learning curves",
        "Scores",
        "Context",
        "Attention",
        "Sample text",
    ]
    assert "This part is missing" not in html
    assert "is not measured" not in html
    for words in ("a stream, with memory", "a window of 40 before each", "RECL, r = 0.1", "its window of 16 tokens"):
        assert words in html
    assert html.count("<img ") == 1 + 2 + 4 + 3
    assert "&lt;b&gt;as" in html


def test_nothing_is_fetched(make_run: Callable[..., Path]) -> None:
    html = report(make_run("xl", memory=20))
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "<script" not in html
    assert "@import" not in html


def test_a_run_whose_text_is_gone_still_has_its_curves(make_run: Callable[..., Path], corpus: Path) -> None:
    run = make_run("xl", memory=20)
    corpus.unlink()
    html = report(run)
    assert "xl is not measured: there is no file or folder" in html
    assert html.count("<img ") == 1


def test_scores_stand_beside_published_ones(
    make_run: Callable[..., Path], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(published.SCORES, str(corpus), (Published("somebody's", 41, 1.06), Published("worse", 3, 99.0)))
    monkeypatch.setitem(published.UNITS, str(corpus), "bits per character")
    html = report(make_run("xl", memory=20))
    rows = re.findall(r"<tr[^>]*><td>(somebody&#x27;s|xl|worse)</td><td>([\d.]+M)</td><td>([\d.]+)</td>", html)
    assert [row[0] for row in rows] == ["somebody&#x27;s", "xl", "worse"]
    assert rows[0][1:] == ("41M", "1.06")


def test_published_scores_know_every_reading() -> None:
    assert published.published_for("enwik8-authors") == published.published_for("enwik8")
    assert published.published_for("stdlib") == ("", ())


def test_runs_are_read_as_far_as_they_are_whole(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = read_run(make_run("xl", memory=20))
    assert (len(run.training["step"]), run.training["step"][-1]) == (100, 100)
    np.testing.assert_array_equal(run.held_out["bits"], [5.8])
    assert run.evaluation == {"memory": 40, "same_length": True}
    for name in ("metrics.jsonl", "validation.jsonl", "run.json"):
        (run.path / name).unlink()
    bare = read_run(run.path)
    assert (len(bare.training["step"]), bare.machine) == (0, {})
    with pytest.raises(DataError, match="not the folder of a training run"):
        read_run(tmp_path)
    (run.path / "recipe.toml").write_text("a = = b")
    with pytest.raises(DataError, match=r"recipe\.toml cannot be read"):
        read_run(run.path)


def test_text_is_text() -> None:
    html = page("<title>", "a & b", [Section("<x>", table(["<h>"], [["<script>"]], ours=[0]))])
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "<title>&lt;title&gt;</title>" in html
