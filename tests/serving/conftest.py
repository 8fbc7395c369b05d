"""A tiny model of bytes with random weights, and a server of it in this process."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import longspan
from longspan.text_model import TextModel

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "httpx")):
    # The engine needs none of them.
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_engine.py"]

BASE = "http://127.0.0.1:8000"


def tiny(seed: int = 0, family: str = "transformer-xl", *, convolution: int = 0, **reading: object) -> TextModel:
    """Weights so large that every token matters and the next token is uncertain."""
    made = longspan.init(
        family,
        layers=2,
        width=24,
        heads=2,
        seed=seed,
        device="cpu",
        **({"convolution": convolution} if convolution else {}),
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
def client(text: TextModel, folder: Path) -> "Iterator[TestClient]":
    from fastapi.testclient import TestClient

    from longspan.serving.app import create_app
    from longspan.serving.settings import Settings

    settings = Settings(width=4, rows=8, queue=16, state_folder=folder, max_tokens=300, max_body=1 << 20)
    with TestClient(create_app({"tiny": text}, settings), base_url=BASE) as made:
        yield made
