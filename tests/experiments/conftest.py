"""Folders of small runs, as training writes them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longspan.checkpoints.model_folder import save_model
from longspan.tokenizers import ByteTokenizer
from tests.support import build

SMALL = {"layers": 2, "width": 16, "heads": 2, "inner": 16, "segment": 16, "dropout": 0.0}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_bytes("So it was done, <b>as</b> it had been said: naïve, 猫, ~ & $x_1$.\n".encode() * 120)
    return path


@pytest.fixture
def make_run(tmp_path: Path, corpus: Path) -> Callable[..., Path]:
    def make(name: str, family: str = "transformer-xl", **values: object) -> Path:
        torch.manual_seed(0)
        folder = tmp_path / name
        save_model(folder / "best", build(family, SMALL | values), ByteTokenizer())
        evaluation = "\n[evaluation]\nmemory = 40\nsame_length = true\n" if family == "transformer-xl" else ""
        recipe = f'name = "{name}"\n[model]\nfamily = "{family}"\n[data]\ncorpus = "{corpus}"\n{evaluation}'
        (folder / "recipe.toml").write_text(recipe)
        rows = [
            {"step": n, "tokens": n * 64, "bits": 8 / n**0.1, "tokens_per_second": 1e4, "seconds": n * 0.1}
            for n in range(1, 101)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines + '{"step": 101, "tok')
        (folder / "validation.jsonl").write_text('{"step": 50, "tokens": 9, "nats": 4.0, "bits": 5.8}\n')
        (folder / "run.json").write_text('{"processes": [{"device": "cpu"}]}')
        return folder

    return make
