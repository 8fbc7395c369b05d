"""`longspan lm-eval`: tasks of lm-eval on local files."""

import json
from pathlib import Path

import pytest

from .conftest import Cli


def test_the_scores_are_printed(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("cache").resolve())
    pairs = [{"sentence_good": "It is.", "sentence_bad": "It are."}] * 3
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = ["--tasks", "blimp=pairs.jsonl", "--limit", "2", "--device", "cpu"]
    assert cli("lm-eval", model, *flags, "--json").json["blimp"]["sample_len"] == 2
    found = cli("lm-eval", model, *flags)
    assert "blimp acc" in found.out
    assert "fatal" not in found.err  # of git, outside of a repository
    cli("lm-eval", model, "--tasks", "blimp=none.jsonl", "--device", "cpu").refused("none.jsonl")
