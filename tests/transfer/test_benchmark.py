"""benchmarks/transfer.py: the commands of its rows."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import longspan
from longspan.checkpoints.model_folder import load_model
from longspan.transfer.checks import check_settings
from longspan.transfer.finetune import resolve
from longspan.transfer.tasks import open_task

from .conftest import write

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "transfer.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_transfer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def arguments(models: Path, **more: object) -> argparse.Namespace:
    values = {"models": models, "out": models / "out", "group": "systems", "systems": "", "set": [], "source": None}
    return argparse.Namespace(**{**values, "tasks": "conll2003", "seeds": 2, "scratch": False, **more})


def test_every_system_can_tag(script: ModuleType, base: Path, tmp_path: Path) -> None:
    write(tmp_path / "t" / "train.jsonl", [{"words": ["a", "b"], "tags": ["O", "B-X"]}] * 4)
    loaded, data = load_model(base), open_task(tmp_path / "t")
    longspan.init("elmo", device="cpu", layers=2, width=16, filters=[[1, 8]]).save(tmp_path / "elmo")
    for name in script.SYSTEMS:
        system = script.system_of(name, "conll2003", arguments(tmp_path))
        model = load_model(tmp_path / "elmo") if name == "elmo" else loaded
        check_settings(resolve(model, data, system.recipe, system.settings))


def test_rows(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpt").mkdir()
    given = arguments(tmp_path, systems="gpt,bert", set=["training.steps=2"])
    script.check(given)
    assert "bert" in capsys.readouterr().err
    (row,) = script.rows(given)
    assert row.system == "gpt"
    assert "--epochs" not in row.command(given)
    assert "--epochs" in row.command(arguments(tmp_path))
    with pytest.raises(SystemExit, match="gtp"):
        script.check(arguments(tmp_path, systems="gtp"))
