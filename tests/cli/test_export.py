"""`longspan export`: the same weights, converted to the given dtype, with their origin in the card."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspan.bundled import model_path

from .conftest import Cli

FEW = ["model.layers=1", "model.width=32", "model.heads=2"]
FEW += ["training.segment=16", "training.batch=2", "training.steps=4"]


@pytest.fixture
def run(cli: Cli, text: Path) -> Path:
    sets = [part for key in [*FEW, "training.validate_every=2"] for part in ("--set", key)]
    assert cli("train", "--recipe", "tiny", "--data", text, "--device", "cpu", *sets, "--out", "run").code == 0
    return Path("run")


def test_export_of_a_run(cli: Cli, run: Path) -> None:
    Path("notes.md").write_text("# A little one\n\nIt reads one sentence.\n")
    flags = ["--dtype", "bfloat16", "--set", "reading.memory=77", "--notes", "notes.md"]
    assert cli("export", run, "out", *flags).code == 0
    names = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "manifest.json"}
    assert {path.name for path in Path("out").iterdir()} == names
    before, after = load_file(run / "best" / "model.safetensors"), load_file("out/model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # Rounding to the 8 bits of bfloat16.
        assert after[name].dtype == torch.bfloat16
        torch.testing.assert_close(after[name].float(), tensor, rtol=2**-8, atol=0.0)
    assert cli("info", "out", "--json").json["reading"]["memory"] == 77
    assert cli("info", run, "--json").json["reading"]["memory"] != 77
    card, about = Path("out/README.md").read_text(), json.loads((run / "run.json").read_text())
    assert card.startswith("# A little one\n\nIt reads one sentence.\n")
    for fact in ("Recipe tiny", about["data"]["fingerprint"], about["processes"][0]["commit"], "77", "bfloat16"):
        assert str(fact) in card


@pytest.mark.parametrize("stored", [("--dtype", "bfloat16"), ("--int8",)])
def test_a_second_export_changes_nothing(cli: Cli, run: Path, stored: tuple[str, ...]) -> None:
    """bfloat16 and int8 stay so on a CPU, where they are loaded as float32; the notes are kept."""
    cli("export", run, "first", *stored)
    assert f", {stored[-1].removeprefix('--')}, " in cli("export", "first", "second").out
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    assert cli("export", run, "same").code == 0
    assert Path("same/model.safetensors").read_bytes() == (run / "best" / "model.safetensors").read_bytes()


def test_export_of_the_bundled_model(cli: Cli) -> None:
    assert cli("export", "--out", "x").code == 0
    assert Path("x/model.safetensors").stat().st_size == (model_path(None) / "model.safetensors").stat().st_size


def test_wrong_use_is_one_line_and_creates_nothing(cli: Cli, model: Path) -> None:
    Path("latin.md").write_bytes(b"na\xefve")
    cli("export", "nowhere", "x").refused("nowhere")
    cli("export", model).refused("OUT")
    cli("export", model, model).refused("m already exists")
    cli("export", model, "x", "--dtype", "float8").refused("'float8'", "'float64'")
    cli("export", model, "x", "--notes", "none.md").refused("none.md")
    cli("export", model, "x", "--notes", "latin.md").refused("latin.md", "UTF-8")
    cli("export", model, "x", "--set", "memory=3").refused("memory=3", "reading.memory=640")
    cli("export", model, "x", "--set", "reading.memroy=3").refused("'memroy'", "'memory'")
    cli("export", model, "x", "--set", "reading.memory=1", "--set", "model.width=64").refused("model.width=64")
    assert not Path("x").exists()


def test_export_for_other_libraries(cli: Cli, model: Path) -> None:
    pytest.importorskip("transformers")
    result = cli("export", model, "--to", "hf", "--out", "hf", "--set", "reading.memory=9")
    assert result.code == 0
    assert "transformers" in result.out
    config = json.loads(Path("hf/config.json").read_text())
    assert (config["model_type"], config["reading"]["memory"]) == ("longspan", 9)
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModelForCausalLM"}
    cli("export", model, "--to", "hf", "--out", "hf").refused("hf exists")
    cli("export", model, "--to", "gguf", "--out", "x").refused("'gguf'", "onnx")
    cli("export", model, "x", "--out", "y").refused("x", "--out y")
    cli("export", model, "--to", "onnx", "--out", "x", "--dtype", "bfloat16").refused("bfloat16")
