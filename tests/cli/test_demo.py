"""`longspan demo`, with a smaller model and fewer steps."""

import bz2
from pathlib import Path
from typing import Any

import pytest

from longspan.experiments import demo
from longspan.experiments.stories import stories

from .conftest import Cli


def test_a_report_that_cannot_be_written_is_refused_at_once(cli: Cli) -> None:
    cli("demo", "--report", "nowhere/page.html").refused("--report nowhere/page.html", "there is no folder nowhere")
    cli("demo", "--report", ".").refused("--report .", "is a folder")


def test_it_shows_memory_then_learning(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conclusion is the same every time: so is the output, apart from the time in the page."""
    pytest.importorskip("matplotlib")
    small: dict[str, Any] = {key: dict(table) for key, table in demo.TRAINING.items()}
    small["model"] |= {"layers": 1, "width": 32, "heads": 2, "inner": 64}
    small["training"] |= {"steps": 6, "batch": 4, "memory": 32}
    monkeypatch.setattr(demo, "TRAINING", small)
    monkeypatch.setattr(demo, "SHOWN_STEPS", (2, 6))
    monkeypatch.setattr(demo, "HELD_OUT_BYTES", 600)
    monkeypatch.setattr(demo, "SAMPLE", 10)
    monkeypatch.setattr(demo, "MEMORIES", (16, 64))
    Path("page.txt").write_text("It was late, and it was cold. " * 5)
    monkeypatch.setattr(demo, "PAGE", Path("page.txt"))
    monkeypatch.setattr("longspan.cli.demo.CONTINUATION", 5)
    monkeypatch.setattr("longspan.bundled.FOLDER", model)
    first, second = (cli("demo", "--report", "page.html", "--threads", 1) for _ in range(2))
    assert first.code == 0, first.err
    assert first.out == second.out
    assert [first.out.count(f"after {step} steps") for step in (0, 2, 6)] == [1, 1, 1]
    for memory in demo.MEMORIES:
        assert f"bundled model, memory {memory:,} " in first.out
    assert "small model, memory 256" in first.out
    page = Path("page.html").read_text()
    assert page.count("<figure>") == 3
    assert "bzip2 -9" in page


def test_rows_of_compressors() -> None:
    content = demo.PAGE.read_bytes()
    found = {row.name: row.bits for row in demo.compressors(content)}
    assert found["bzip2 -9"] == 8 * len(bz2.compress(content, 9)) / len(content)
    assert found["xz -9"] > found["bzip2 -9"]


def test_stories_are_reproducible_and_held_out_ones_are_different() -> None:
    train, held_out = stories(demo.TRAINING_BYTES, 1), demo.held_out_stories()
    assert train == stories(demo.TRAINING_BYTES, 1)
    seen = set(train.split("\n\n"))
    new = [one for one in held_out.split("\n\n") if one and one not in seen]
    assert len(new) >= 0.95 * held_out.count("\n\n")
