"""`longspan export`: the same weights, rounded as asked, with all that is known of them in the card."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .conftest import Cli

FEW = ["model.layers=1", "model.width=32", "model.heads=2", "model.segment=16", "training.batch=2", "training.steps=4"]


@pytest.fixture
def run(cli: Cli, text: Path) -> Path:
    sets = [part for key in [*FEW, "training.validate_every=2"] for part in ("--set", key)]
    assert cli("train", "--recipe", "tiny", "--data", text, "--device", "cpu", *sets, "--out", "run").code == 0
    return Path("run")


def test_a_run_is_handed_on(cli: Cli, run: Path) -> None:
    Path("notes.md").write_text("# A little one\n\nIt reads one sentence.\n")
    flags = ["--dtype", "bfloat16", "--set", "model.memory=77", "--notes", "notes.md"]
    assert cli("export", run, "out", *flags).code == 0
    names = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "manifest.json"}
    assert {path.name for path in Path("out").iterdir()} == names
    before, after = load_file(run / "best" / "model.safetensors"), load_file("out/model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # Rounded to eight bits: off by half of the last of them at most.
        assert after[name].dtype == torch.bfloat16
        torch.testing.assert_close(after[name].float(), tensor, rtol=2**-8, atol=0.0)
    assert cli("info", "out", "--json").json["config"]["memory"] == 77
    assert cli("info", run, "--json").json["config"]["memory"] != 77
    card, about = Path("out/README.md").read_text(), json.loads((run / "run.json").read_text())
    assert card.startswith("# A little one\n\nIt reads one sentence.\n")
    for told in ("Recipe tiny", about["data"]["fingerprint"], about["processes"][0]["commit"], "77", "bfloat16"):
        assert str(told) in card


def test_what_is_handed_on_again_stays_as_it_is(cli: Cli, run: Path) -> None:
    """Narrow weights stay narrow on a CPU, though they are widened there for use; notes go along."""
    cli("export", run, "first", "--dtype", "bfloat16")
    assert cli("export", "first", "second").code == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    assert cli("export", run, "whole").code == 0
    assert Path("whole/model.safetensors").read_bytes() == (run / "best" / "model.safetensors").read_bytes()


def test_wrong_use_is_one_sentence_and_leaves_nothing(cli: Cli, model: Path) -> None:
    Path("latin.md").write_bytes(b"na\xefve")
    cli("export", "nowhere", "x").refused("nowhere")
    cli("export", model).refused("OUT")
    cli("export", model, model).refused("already exists")
    cli("export", model, "x", "--dtype", "float8").refused("float8", "did you mean")
    cli("export", model, "x", "--notes", "none.md").refused("none.md")
    cli("export", model, "x", "--notes", "latin.md").refused("UTF-8")
    cli("export", model, "x", "--set", "memory=3").refused("model.memory=640")
    cli("export", model, "x", "--set", "model.memroy=3").refused("memroy")
    cli("export", model, "x", "--set", "model.width=64").refused("need other weights")
    assert not Path("x").exists()
