"""Needs a GPU: a run that torchrun starts with NCCL is saved, resumed in other forms, and equals a plain run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan.training.observers.metrics import read_lines

pytestmark = pytest.mark.gpu
REPOSITORY = Path(__file__).parents[2]
RECIPE = """
[model]
family = "transformer-xl"
layers = 2
width = 128
heads = 2
dropout = 0.0
[training]
batch = 8
segment = 32
memory = 32
lr = 0.001
save_every = 4
compile = false
optimizer = "muon"
"""


def train(folder: Path, out: str, steps: int, *more: str, torchrun: bool = True) -> "subprocess.CompletedProcess[str]":
    """A run in a new process, with one process of torchrun or without."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if torchrun else []
    command = [sys.executable, *launcher, "-m", "longspan", "train", "--out", str(folder / out), "--device", "cuda"]
    command += ["--recipe", str(folder / "small.toml"), "--data", str(folder / "text.txt"), *more]
    command += ["--set", f"training.steps={steps}"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "LONGSPAN_CACHE": str(folder / "cache")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over a lazy dog.\n" * 900)
    return tmp_path


def test_a_run_is_saved_and_resumed_in_every_form(folder: Path) -> None:
    """bfloat16 products; with `fsdp` weights are gathered in bfloat16 too."""
    constant = ("--set", "training.schedule='constant'")
    runs = [train(folder, "plain", 8, *constant, torchrun=False)]
    for steps, form in ((4, "fsdp"), (8, "ddp")):
        changed = ("--resume", "auto", "--set", f"training.parallel='{form}'")
        runs.append(train(folder, "forms", steps, *constant, *changed))
    assert [each.returncode for each in runs] == [0] * 3, "\n".join(each.stderr[-500:] for each in runs)
    plain, forms = (read_lines(folder / out / "metrics.jsonl") for out in ("plain", "forms"))
    assert [row["step"] for row in forms] == list(range(1, 9))
    assert [row["loss"] for row in forms] == pytest.approx([row["loss"] for row in plain], abs=0.01)
    assert forms[-1]["loss"] < 0.9 * forms[0]["loss"]
    later = [row for row in forms if row["step"] % 4 != 1]  # memory is exchanged after the first step of a launch
    assert all(len(row["memory_gib"]) == 1 and row["memory_gib"][0] > 0 for row in later)
    if "H200" in torch.cuda.get_device_name():
        assert all(0 < row["mfu"] < 1 for row in forms)
    launches = json.loads((folder / "forms/run.json").read_text())["processes"]
    assert len(launches) == 2


def test_graph_capture_is_refused(folder: Path) -> None:
    found = train(folder, "captured", 4, "--set", "training.cuda_graph=true")
    assert found.returncode != 0
    sentences = [line for line in found.stderr.splitlines() if line.startswith("longspan:")]
    assert len(sentences) == 1
    assert "training.cuda_graph=true" in sentences[0]
