"""A tiny model, and folders of tasks that it can learn."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import longspan
from longspan.text_model import TextModel

GOOD, BAD, REST = ["fine", "lovely", "great"], ["awful", "dull", "ugly"], ["the", "a", "film", "was", "it", "very"]


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences with one word that decides the label."""
    draw = random.Random(seed)
    rows = []
    for k in range(count):
        words = [draw.choice(REST) for _ in range(draw.randint(2, 6))]
        words.insert(draw.randint(0, len(words)), draw.choice(GOOD if k % 2 else BAD))
        rows.append({"text": " ".join(words), "label": "good" if k % 2 else "bad"})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Transformer-XL on bytes."""
    path = tmp_path_factory.mktemp("base") / "model"
    shape: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "inner": 48, "dropout": 0.0}
    longspan.init("transformer-xl", reading={"segment": 16, "memory": 64}, device="cpu", **shape).save(path)
    return path


@pytest.fixture(scope="session")
def model(base: Path) -> TextModel:
    return longspan.load(base, device="cpu")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task with train and test, and without dev."""
    path = tmp_path_factory.mktemp("tasks") / "moods"
    write(path / "train.jsonl", sentences(60, seed=1))
    write(path / "test.jsonl", sentences(16, seed=2))
    return path
