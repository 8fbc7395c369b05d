"""A small text, small recipes, and runs without terminal output."""

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.data import Encoded
from longspan.tokenizers import ByteTokenizer
from longspan.training import run
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from longspan.training.observers.checkpoints import Checkpoints
from longspan.training.observers.metrics import Metrics, read_lines
from longspan.training.processes import ALONE, Processes
from longspan.training.recipe import Recipe, build_recipe
from tests.programs import PYTHON

Make = Callable[..., Recipe]
ALPHABET = np.frombuffer(b"the quick brown fox jumps over a lazy dog.\n", np.uint8)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_text(tokens: int = 700, fingerprint: str = "a" * 64) -> Encoded:
    """Random characters of a small alphabet in three documents."""
    ids = np.random.default_rng(7).choice(ALPHABET, tokens)
    starts = np.array([0, tokens // 3, tokens // 2], np.int64)
    return Encoded("a small text", "train", ids, starts, ByteTokenizer(), fingerprint, tokens)


def make_recipe(**changes: Any) -> Recipe:
    """Two layers, dropout, a memory. A keyword such as `training_steps=5` sets training.steps."""
    values: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "width": 16, "heads": 2, "inner": 24, "dropout": 0.2},
        "data": {},
        "training": {
            "steps": 12,
            "batch": 4,
            "segment": 8,
            "memory": 12,
            "lr": 0.01,
            "clip": 0.5,
            "warmup": 3,
            "save_every": 1,
            "keep": 100,
        },
        "evaluation": {},
    }
    for key, value in changes.items():
        table, _, name = key.partition("_")
        values[table][name] = value
    return build_recipe(values, "small")


def train(
    recipe: Recipe,
    out: Path,
    text: Encoded,
    monkeypatch: pytest.MonkeyPatch,
    *more: Observer,
    processes: Processes = ALONE,
    **options: Any,
) -> run.Outcome:
    monkeypatch.setattr(run, "open_text", lambda recipe, split, *_: text)
    training = recipe.training
    metrics = [Metrics(out)] if processes.is_first else []
    observers = [*metrics, *more, Checkpoints(out, training.save_every, training.keep)]
    return run.train(recipe, out, observers=observers, **options)


def run_in_process(function: Callable[..., None], *arguments: Any, timeout: float | None = 300) -> int:
    """The exit code of a new process that calls a function of a test module. It has imported torch but not computed."""
    call = f"import torch; torch.set_num_threads(1); import {function.__module__} as m; m.{function.__name__}"
    command = [PYTHON, "-c", f"{call}(*{arguments!r})"]
    return subprocess.run(command, cwd=Path(__file__).parents[2], timeout=timeout, check=False).returncode


def losses(out: Path) -> list[float]:
    rows = read_lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "each step once, in order"
    return [row["loss"] for row in rows]


def content(checkpoint: Path) -> dict[str, str]:
    """Hashes of what must be bit-equal: weights, averages, optimizer, random state, memory."""
    names = ("model.safetensors", "training.safetensors")
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}


class Losses(Observer):
    """Collects the losses of a run."""

    def __init__(self) -> None:
        self.curve: list[float] = []

    def row(self, trainer: Trainer, row: Row) -> None:
        self.curve.append(row.loss)
