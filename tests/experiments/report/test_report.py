"""The report: one self-contained file, also when a part is missing."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.checkpoints.model_folder import load_model
from longspan.contract import LanguageModel
from longspan.data.encoded import open_corpus
from longspan.errors import DataError
from longspan.experiments.report import published
from longspan.experiments.report.page import Section, page, table
from longspan.experiments.report.published import Published
from longspan.experiments.report.report import Effort, _open, build_report
from longspan.experiments.report.runs import read_run
from longspan.scoring.losses import stream_losses
from longspan.tokenizers import ByteTokenizer

SMALL = Effort(stream=200, sliding=20, targets=10, longest_context=50, attention=200, sample=20)


def report(*folders: Path) -> str:
    scratch = folders[0].parent / "scratch"
    scratch.mkdir()
    return build_report([read_run(folder) for folder in folders], scratch, torch.device("cpu"), torch.float32, SMALL)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_every_section_is_there_and_nothing_is_fetched(make_run: Callable[..., Path]) -> None:
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
    for words in ("stream with memory", "sliding window of 40", "RECL, r = 0.1", "16 tokens"):
        assert words in html
    assert html.count("<img ") == 1 + 2 + 2 + 4 + 3
    assert "&lt;b&gt;as" in html
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "<script" not in html
    assert "@import" not in html


def test_a_run_is_measured_on_its_own_test_text(make_run: Callable[..., Path], corpus: Path) -> None:
    folder, test = make_run("xl", memory=20), corpus.with_name("held.txt")
    test.write_bytes(b"never trained on\n" * 30)
    before = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(before.replace("[data]\n", f'[data]\ntest = "{test}"\n'))
    (opened,), problems = _open([read_run(folder)], torch.device("cpu"), torch.float32)
    assert (opened.held_out.ids.tobytes(), problems) == (test.read_bytes(), [])


def test_a_run_without_its_text_still_has_curves(make_run: Callable[..., Path], corpus: Path) -> None:
    run = make_run("xl", memory=20)
    corpus.unlink()
    html = report(run)
    assert re.search(f"xl is not measured: [^<]*{corpus}", html)
    assert html.count("<img ") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_scores_are_ranked_among_published_ones(
    make_run: Callable[..., Path], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(published.SCORES, str(corpus), (Published("someone's", 41, 1.06), Published("worse", 3, 99.0)))
    monkeypatch.setitem(published.UNITS, str(corpus), "bits per character")
    monkeypatch.setitem(published.COUNTED, str(corpus), ("byte",))
    html = report(make_run("xl", memory=20))
    rows = re.findall(r"<tr[^>]*><td>(someone&#x27;s|xl|worse)</td><td>([\d.]+M)</td><td>([\d.]+)</td>", html)
    assert [row[0] for row in rows] == ["someone&#x27;s", "xl", "worse"]
    assert rows[0][1:] == ("41M", "1.06")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_rows_score_the_same_tokens(make_run: Callable[..., Path], corpus: Path) -> None:
    """Against logits of windows cut by hand, and against the losses of a stream."""
    folders = [make_run("xl", memory=20), make_run("window", "vanilla")]
    html = report(*folders)
    rows = re.findall(r"<tr><td>(xl|window)</td><td>(s[^<]*)</td><td>([^<]*)</td><td>[^<]*</td><td>([^<]*)</td>", html)
    shown = {(name, method): (all_tokens, same) for name, method, all_tokens, same in rows}
    ids = open_corpus(str(corpus), "test", ByteTokenizer()).ids
    xl = load_model(folders[0], overrides={"memory": 40, "same_length": True}).model
    window = load_model(folders[1]).model
    losses = np.concatenate([chunk.losses for chunk in stream_losses(xl, ids[:201], xl.reading)])

    def sliding(model: LanguageModel, width: int) -> float:
        windows = np.stack([ids[t - width : t + 1] for t in range(41, 61)]).astype(np.int64)
        logits, _ = model(torch.from_numpy(windows[:, :-1]))
        of_targets = logits[:, -1].log_softmax(-1)[torch.arange(20), torch.from_numpy(windows[:, -1])]
        return -of_targets.mean().item() / np.log(2)

    expected = {
        ("xl", "stream with memory"): (losses.mean() / np.log(2), losses[40:60].mean() / np.log(2)),
        ("xl", "sliding window of 40"): (None, sliding(xl, 40)),
        ("window", "sliding window of 16"): (None, sliding(window, 16)),
    }
    assert set(shown) == set(expected)
    for row, (all_tokens, same) in expected.items():
        assert shown[row][0] == ("" if all_tokens is None else f"{all_tokens:.3f}")
        assert float(shown[row][1]) == pytest.approx(same, abs=2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_scores_per_other_tokens_are_not_ranked(
    make_run: Callable[..., Path], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perplexity per byte is far below perplexity per word, and not comparable with it."""
    monkeypatch.setitem(published.SCORES, str(corpus), (Published("someone's", 41, 24.0),))
    monkeypatch.setitem(published.UNITS, str(corpus), "perplexity per word")
    html = report(make_run("xl", memory=20))
    assert re.search("xl [^<]*byte[^<]*perplexity per word", html)
    assert re.findall(r"<td>(someone&#x27;s|xl)</td><td>[\d.]+M</td>", html) == ["someone&#x27;s"]
    assert published.comparable("enwik8-authors", "byte")
    assert not published.comparable("enwik8", "character")
    assert published.comparable("text8", "character")
    assert published.comparable("ptb-authors", "word")


def test_published_scores_hold_for_every_tokenizer_of_a_corpus() -> None:
    assert published.published_for("enwik8-authors") == published.published_for("enwik8")
    assert published.published_for("stdlib") == ("", ())


def test_incomplete_runs_are_read_as_far_as_possible(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = read_run(make_run("xl", memory=20))
    assert (len(run.training["step"]), run.training["step"][-1]) == (100, 100)
    np.testing.assert_array_equal(run.held_out["bits"], [5.8])
    assert run.evaluation == {"memory": 40, "same_length": True}
    for name in ("metrics.jsonl", "validation.jsonl", "run.json"):
        (run.path / name).unlink()
    bare = read_run(run.path)
    assert (len(bare.training["step"]), bare.machine) == (0, {})
    with pytest.raises(DataError, match=rf"{tmp_path}.*recipe\.toml"):
        read_run(tmp_path)
    (run.path / "recipe.toml").write_text("a = = b")
    with pytest.raises(DataError, match=r"recipe\.toml"):
        read_run(run.path)


def test_the_pointer_of_an_old_recipe(make_run: Callable[..., Path]) -> None:
    """longspan 0.1 called it copy."""
    folder = make_run("xl", memory=20)
    (folder / "recipe.toml").write_text("[evaluation]\nmemory = 64\ncopy = 32\nlanes = 4\n")
    assert read_run(folder).evaluation == {"memory": 64, "pointer": 32}


def test_text_is_escaped() -> None:
    html = page("<title>", "a & b", [Section("<x>", table(["<h>"], [["<script>"]], ours=[0]))])
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "<title>&lt;title&gt;</title>" in html


@pytest.mark.parametrize(
    "recipe",
    [
        "model = 5",
        "model = [[",
        '[[model]]\nfamily = "x"',
        "[model]\nfamily = 3",
        "[data]\ncorpus = 1.5",
        "evaluation = true",
        "[evaluation]\nmemory = -1",
        "[evaluation]\nsegment = 0",
        '[evaluation]\nsegment = "8"',
        f"[evaluation]\nmemory = {10**30}",
        f"[evaluation]\nmemory = {'9' * 5000}",
        f"x = {'[' * 5000}",
    ],
)
def test_a_damaged_recipe_is_refused_by_name(make_run: Callable[..., Path], recipe: str) -> None:
    folder = make_run("xl", memory=20)
    (folder / "recipe.toml").write_text(recipe)
    with pytest.raises(DataError, match=r"recipe\.toml"):
        read_run(folder)


@pytest.mark.parametrize("step", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_an_infinite_step_is_refused_with_its_line(make_run: Callable[..., Path], step: str) -> None:
    folder = make_run("xl", memory=20)
    line = '{"step": STEP, "tokens": 1, "bits": 1, "tokens_per_second": 1, "seconds": 1}\n'
    (folder / "metrics.jsonl").write_text(line.replace("STEP", "1") + line.replace("STEP", step))
    with pytest.raises(DataError, match=r"line 2 of .*metrics\.jsonl"):
        read_run(folder)


def test_an_infinite_loss_is_left_out_of_the_curves(make_run: Callable[..., Path]) -> None:
    folder = make_run("xl", memory=20)
    (folder / "validation.jsonl").write_text('{"step": 50, "bits": 5.8}\n{"step": 60, "bits": NaN}\n')
    assert read_run(folder).held_out["step"].tolist() == [50]
