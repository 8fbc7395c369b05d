"""`longspan demo`: the parts that do not take minutes."""

from pathlib import Path

import pytest
import torch

import longspan
from longspan.cli import demo

from .conftest import Cli


def test_a_report_that_cannot_be_written_is_refused_at_once(cli: Cli) -> None:
    cli("demo", "--report", "nowhere/page.html").refused("--report nowhere/page.html", "there is no folder nowhere")
    cli("demo", "--report", ".").refused("--report .", "is a folder")


def test_it_starts_with_the_bundled_model(model: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr("longspan.bundled.FOLDER", model)
    threads = torch.get_num_threads()
    demo._show_bundled(torch.device("cpu"))
    out = capfd.readouterr().out
    count = sum(parameter.numel() for parameter in longspan.load(model).model.parameters())
    assert f"{count:,} parameters and was trained on 90 English novels" in out
    assert "a memory of 40 of them" in out
    generated = out.partition(demo.OPENING)[2].partition("\n\nTry it")[0]
    assert 100 < len(generated) <= 300  # bytes; an untrained model generates few complete characters
    assert torch.get_num_threads() == threads
