"""A tiny model of bytes with random weights, and a server of it in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient

import longspan
from longspan.serving.app import create_app
from longspan.serving.settings import Settings
from longspan.text_model import TextModel

BASE = "http://127.0.0.1:8000"


def tiny(seed: int = 0, family: str = "transformer-xl", **reading: object) -> TextModel:
    """Weights so large that every token matters and the next token is uncertain."""
    made = longspan.init(
        family,
        layers=2,
        width=24,
        heads=2,
        seed=seed,
        device="cpu",
        reading={"segment": 16, **(reading or {"memory": 20})},
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return made


@pytest.fixture(scope="session")
def text() -> TextModel:
    return tiny()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def client(text: TextModel, folder: Path) -> Iterator[TestClient]:
    settings = Settings(width=4, rows=8, queue=16, state_folder=folder, max_tokens=300, max_body=1 << 20)
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as made:
        yield made
