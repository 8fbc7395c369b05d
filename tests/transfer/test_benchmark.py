"""benchmarks/transfer.py: the commands of its rows."""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

import longspan
from longspan.checkpoints.model_folder import load_model
from longspan.transfer.checks import check_settings
from longspan.transfer.finetune import finetune, resolve
from longspan.transfer.predict import load_predictor
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
    given = arguments(tmp_path)
    systems = {name: script.system_of(name, "conll2003", given) for name in script.SYSTEMS}
    for system in systems.values():
        (tmp_path / system.model).mkdir(exist_ok=True)
    assert {row.system for row in script.rows(given)} == set(systems) - {"ulmfit-backward"}
    for row in script.rows(given):
        system = systems[row.system]
        model = load_model(tmp_path / "elmo") if row.system == "elmo" else loaded
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


def test_ablations(script: ModuleType, tmp_path: Path) -> None:
    for name in ("ulmfit", "ulmfit-no-wikipedia", "awd-lstm"):
        (tmp_path / name).mkdir()
    given = arguments(tmp_path, group="ablations", tasks="imdb", scratch=True)
    commands = {row.name: row.command(given) for row in script.rows(given)}
    without = {"from-scratch", "no-wikipedia", "no-lm-tuning", "no-unfreezing", "no-discriminative-rates"}
    assert {f"ulmfit-{name}" for name in without} < set(commands)
    assert "ulmfit-from-scratch-scratch" not in commands
    scratch = {name for name, command in commands.items() if "--from-scratch" in command}
    assert scratch == {name for name in commands if name.endswith("-scratch")}


def test_the_ensemble_of_ulmfit(
    script: ModuleType, base: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From both directions of the seeds that have both, once, with the mean of their probabilities by hand."""
    given = arguments(tmp_path, tasks="moods", report=False, minutes=0.0, jobs=1, out=tmp_path)
    opened = open_task(folder)
    monkeypatch.setattr(script, "open_task", lambda *_: opened)
    sets = ["training.steps=1", "training.batch=2", "training.lr=0.1"]
    for name, reverse in (("ulmfit", "false"), ("ulmfit-backward", "true")):
        out = tmp_path / "moods" / name / "seed-1"
        finetune(base, folder, out, overrides=[*sets, f"model.reverse={reverse}"], device="cpu")
    shutil.copytree(tmp_path / "moods" / "ulmfit" / "seed-1", tmp_path / "moods" / "ulmfit" / "seed-2")
    (found,), failed = script.run_all(given)
    assert not failed
    assert (found["row"], found["seeds"]) == ("ulmfit-ensemble", 1)
    members = [load_predictor(tmp_path / "moods" / name / "seed-1") for name in script.DIRECTIONS]
    for split, examples in (("dev", opened.dev), ("test", opened.test())):
        first, second = ([p.probabilities[1] for p in member.predict(examples)] for member in members)
        right = [(a + b > 1) == (e.label == "good") for a, b, e in zip(first, second, examples, strict=True)]
        assert found[f"{split}_per_seed"] == [sum(right) / len(right)]
    monkeypatch.setattr(script, "load_predictor", lambda *_, **__: pytest.fail("scored twice"))
    assert script.run_all(given) == ([found], [])
