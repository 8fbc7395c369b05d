"""`longspan demo`: what can be told without the minutes it takes."""

from pathlib import Path

import pytest
import torch

import longspan
from longspan.cli import demo

from .conftest import Cli


def test_a_report_that_cannot_be_written_is_told_at_once(cli: Cli) -> None:
    cli("demo", "--report", "nowhere/page.html").refused("there is no folder nowhere")
    cli("demo", "--report", ".").refused("--report .: it is a folder")


def test_it_opens_with_the_model_in_the_box(model: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr("longspan.box.FOLDER", model)
    demo._open_box(torch.device("cpu"))
    told = capfd.readouterr().out
    count = sum(parameter.numel() for parameter in longspan.load(model).model.parameters())
    assert f"{count:,} parameters trained on 90 English novels" in told
    assert "remembers the last 40 of them" in told
    written = told.partition(demo.OPENING)[2].partition("\n\nMore of it")[0]
    assert 100 < len(written) <= 300  # bytes; of an untrained model few make a character
