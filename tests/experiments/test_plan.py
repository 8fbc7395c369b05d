"""benchmarks/plan.py: commands run once, continue after a limit or a signal, and results are packed without weights."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from longspan.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "plan.py"
PLAN = """
[texts]
tiny = "tiny.txt"

[[run]]
name = "first"
minutes = 1
answers = "what happens"
results = "nowhere"
steps = [
    "echo {source} >> {runs}/order.txt",
    ["echo a >> {runs}/a.txt; python -c 'import longspan'", "echo b >> {runs}/b.txt; longspan --version"],
]

[[run]]
name = "long"
minutes = 3
answers = "whether it can be cut off"
results = "nowhere"
steps = ["%s"]

[[run]]
name = "second"
minutes = 2
answers = "the rest"
results = "nowhere"
steps = ["false; echo never >> {runs}/order.txt", "echo never >> {runs}/order.txt"]

[[run]]
name = "card"
minutes = 1
answers = "which commit"
results = "nowhere"
steps = ["echo {commit} >> {runs}/commit.txt"]
"""


def start(folder: Path, *names: str, last: str = "true", **options: object) -> "subprocess.Popen[str]":
    (folder / "plan.toml").write_text(PLAN % last)
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    command = [sys.executable, str(SCRIPT), *names, "--plan", f"{folder}/plan.toml", "--runs", f"{folder}/runs", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> tuple[int, list[list[str]]]:
    """The exit code, and the name and state of every command."""
    printed, _ = process.communicate(timeout=60)
    return process.returncode, [re.split(r"  +", line)[:2] for line in printed.splitlines()]


def test_commands_run_once_and_a_failed_one_ends_its_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    code, states = finish(start(tmp_path, "second", "first", source="texts"))
    assert code == 1
    assert states[0] == ["second-1", "failed"]
    assert sorted(states[1:]) == [[f"first-{name}", "done"] for name in ("1", "2a", "2b")]
    assert finish(start(tmp_path, "first")) == (0, [])
    assert (runs / "order.txt").read_text() == "texts\n"
    assert (runs / "a.txt").read_text() == "a\n"
    assert (runs / "logs" / "first-2b.log").read_text().startswith("longspan ")


@pytest.mark.parametrize("how", ["limit", "signal"])
def test_a_command_that_is_cut_off_can_save_and_runs_again(tmp_path: Path, how: str) -> None:
    runs = tmp_path / "runs"
    saving = f"trap 'echo saved >> {runs}/saved.txt; exit 1' TERM; touch {runs}/started; sleep 60 & wait"
    process = start(tmp_path, "long", last=saving, limit=8 if how == "limit" else 500, grace=3)
    if how == "signal":
        while not (runs / "started").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    code, states = finish(process)
    assert (code, states[-1]) == (0, ["long-1", "cut off"])
    assert (runs / "saved.txt").read_text() == "saved\n"
    assert finish(start(tmp_path, "long"))[1] == [["long-1", "done"]]


def test_results_are_packed_without_weights(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    sizes = {"run/metrics.csv": 10, "run/losses-1.npz": 9, "run/table.json": 41_000_000, "run/model.safetensors": 10}
    sizes |= {"run/best/manifest.json": 10, "run/best/tokenizer.json": 10}
    for name, size in sizes.items():
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).write_bytes(b" " * size)
    (runs / "weights").mkdir()
    (runs / "weights" / "model.safetensors").write_bytes(os.urandom(20_000_000))
    code, states = finish(start(tmp_path, "first", pack=out))
    assert code == 0
    assert states[-1] == [f"not packed: {runs}/run/table.json, 41,000,000 bytes"]
    with tarfile.open(out / "results.tar.gz") as archive:
        names = archive.getnames()
    assert {"run/metrics.csv", "run/losses-1.npz", "logs/first-1.log"} <= set(names)
    assert not any(name.startswith("run/best") for name in names)
    assert not {"run/table.json", "run/model.safetensors", "weights/model.safetensors"} & set(names)
    whole = joined(out, "weights.tar.*", tmp_path / "whole.tar")
    with tarfile.open(whole) as archive:
        file = archive.extractfile("weights/model.safetensors")
        assert file is not None
        assert file.read() == (runs / "weights" / "model.safetensors").read_bytes()


def test_large_results_are_packed_in_parts_and_older_ones_removed(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    assert finish(start(tmp_path, "first", pack=out))[0] == 0
    assert [path.name for path in out.iterdir()] == ["results.tar.gz"]
    (runs / "metrics.jsonl").write_bytes(os.urandom(16_000_000))
    assert finish(start(tmp_path, "first", pack=out))[0] == 0
    with tarfile.open(joined(out, "*", tmp_path / "whole.tar.gz")) as archive:
        assert archive.getmember("metrics.jsonl").size == 16_000_000


def joined(folder: Path, pattern: str, whole: Path) -> Path:
    """The two parts of an archive as one file."""
    parts = sorted(folder.glob(pattern))
    assert [part.stat().st_size <= 15_000_000 for part in parts] == [True, True]
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    return whole


def test_cards_need_a_full_commit_before_anything_runs(tmp_path: Path) -> None:
    code, states = finish(start(tmp_path, "first", "card", commit="3d09f1d"))
    assert (code, states) == (2, [])
    assert not (tmp_path / "runs").exists()
    assert finish(start(tmp_path, "card", commit="0" * 40))[1] == [["card-1", "done"]]
    assert (tmp_path / "runs" / "commit.txt").read_text() == "0" * 40 + "\n"


def test_the_commands_of_the_plan_name_recipes_settings_and_scripts_that_exist() -> None:
    lines = subprocess.run(
        [sys.executable, SCRIPT, *plan_names(), "--print"], capture_output=True, text=True, check=True
    ).stdout
    for recipe, rest in re.findall(r"longspan train --recipe (\S+)([^;&|\n]*)", lines):
        words = shlex.split(rest)
        load_recipe(recipe, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
    scripts = set(re.findall(r" ((?:benchmarks|tests)/\S+)", lines))
    assert scripts
    assert [name for name in scripts if not (ROOT / name).exists()] == []
    assert not re.search(r"\{(?!print)[a-z]+\}", lines)


def test_every_run_fits_into_half_an_hour_of_one_machine() -> None:
    printed = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    minutes = {name: int(count) for name, count in re.findall(r"^\| ([\w-]+) \| (\d+)", printed, re.MULTILINE)}
    assert minutes
    assert {name: count for name, count in minutes.items() if count > 28} == {}


def test_a_plan_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--plan", str(tmp_path / "none.toml")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "none.toml; check the name" in found.stderr
    assert "Traceback" not in found.stderr


def plan_names() -> list[str]:
    printed = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\| ([\w-]+) \| \d", printed, re.MULTILINE)
