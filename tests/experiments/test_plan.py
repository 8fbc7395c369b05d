"""benchmarks/plan.py: commands run once, continue after a limit or a signal, and results are packed without weights."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

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


def arguments(folder: Path, *names: str, last: str = "true", **options: object) -> list[str]:
    (folder / "plan.toml").write_text(PLAN % last)
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    return [*names, "--plan", f"{folder}/plan.toml", "--runs", f"{folder}/runs", *words]


def states(printed: str) -> list[list[str]]:
    """The name and state of every command."""
    return [re.split(r"  +", line)[:2] for line in printed.splitlines()]


class Program:
    """plan.py in this process."""

    def __init__(self, module: Any, capsys: pytest.CaptureFixture[str]) -> None:
        self.module, self.capsys = module, capsys

    def __call__(self, *given: str) -> tuple[int, str, str]:
        """The exit code, the output and the errors."""
        try:
            code = self.module.main(list(given))
        except SystemExit as error:
            code = int(error.code or 0)
        return code, *self.capsys.readouterr()

    def run(self, folder: Path, *names: str, **options: Any) -> tuple[int, list[list[str]]]:
        code, printed, _ = self(*arguments(folder, *names, **options))
        return code, states(printed)

    def minutes(self) -> dict[str, int]:
        """The runs of the plan, from its table."""
        return {name: int(count) for name, count in re.findall(r"^\| ([\w-]+) \| (\d+)", self()[1], re.MULTILINE)}


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C still ends the tests
    return Program(importlib.import_module("plan"), capsys)


def test_commands_run_once_and_a_failed_one_ends_its_run(tmp_path: Path, plan: Program) -> None:
    runs = tmp_path / "runs"
    code, found = plan.run(tmp_path, "second", "first", source="texts")
    assert code == 1
    assert found[0] == ["second-1", "failed"]
    assert sorted(found[1:]) == [[f"first-{name}", "done"] for name in ("1", "2a", "2b")]
    assert plan.run(tmp_path, "first") == (0, [])
    assert (runs / "order.txt").read_text() == "texts\n"
    assert (runs / "a.txt").read_text() == "a\n"
    assert (runs / "logs" / "first-2b.log").read_text().startswith("longspan ")


@pytest.mark.parametrize("how", ["limit", pytest.param("signal", marks=pytest.mark.torture)])
def test_a_command_that_is_cut_off_can_save_and_runs_again(tmp_path: Path, how: str, plan: Program) -> None:
    runs = tmp_path / "runs"
    saving = f"trap 'echo saved >> {runs}/saved.txt; exit 1' TERM; touch {runs}/started; sleep 60 & wait"
    given = arguments(tmp_path, "long", last=saving, limit=8 if how == "limit" else 500, grace=3)
    process = subprocess.Popen([sys.executable, str(SCRIPT), *given], stdout=subprocess.PIPE, text=True)
    if how == "signal":
        while not (runs / "started").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, states(printed)[-1]) == (0, ["long-1", "cut off"])
    assert (runs / "saved.txt").read_text() == "saved\n"
    assert plan.run(tmp_path, "long")[1] == [["long-1", "done"]]


def test_results_are_packed_without_weights(tmp_path: Path, plan: Program) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    sizes = {"run/metrics.csv": 10, "run/losses-1.npz": 9, "run/table.json": 41_000_000, "run/model.safetensors": 10}
    sizes |= {"run/best/manifest.json": 10, "run/best/tokenizer.json": 10}
    for name, size in sizes.items():
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).write_bytes(b" " * size)
    (runs / "weights").mkdir()
    (runs / "weights" / "model.safetensors").write_bytes(os.urandom(20_000_000))
    code, found = plan.run(tmp_path, "first", pack=out)
    assert code == 0
    assert found[-1] == [f"not packed: {runs}/run/table.json, 41,000,000 bytes"]
    with tarfile.open(out / "results.tar.gz") as archive:
        names = archive.getnames()
    assert {"run/metrics.csv", "run/losses-1.npz", "logs/first-1.log"} <= set(names)
    assert not any(name.startswith("run/best") for name in names)
    assert not {"run/table.json", "run/model.safetensors", "weights/model.safetensors"} & set(names)
    (out / "results.tar.gz").unlink()
    assert plan.run(tmp_path, pack=out) == (0, found[-1:])  # without names, nothing else is done
    assert (out / "results.tar.gz").is_file()
    whole = joined(out, "weights.tar.*", tmp_path / "whole.tar")
    with tarfile.open(whole) as archive:
        file = archive.extractfile("weights/model.safetensors")
        assert file is not None
        assert file.read() == (runs / "weights" / "model.safetensors").read_bytes()


def test_large_results_are_packed_in_parts_and_older_ones_removed(tmp_path: Path, plan: Program) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    assert plan.run(tmp_path, "first", pack=out)[0] == 0
    assert [path.name for path in out.iterdir()] == ["results.tar.gz"]
    (runs / "metrics.jsonl").write_bytes(os.urandom(16_000_000))
    assert plan.run(tmp_path, "first", pack=out)[0] == 0
    with tarfile.open(joined(out, "*", tmp_path / "whole.tar.gz")) as archive:
        assert archive.getmember("metrics.jsonl").size == 16_000_000


def joined(folder: Path, pattern: str, whole: Path) -> Path:
    """The two parts of an archive as one file."""
    parts = sorted(folder.glob(pattern))
    assert [part.stat().st_size <= 15_000_000 for part in parts] == [True, True]
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    return whole


def test_cards_need_a_full_commit_before_anything_runs(tmp_path: Path, plan: Program) -> None:
    assert plan.run(tmp_path, "first", "card", commit="3d09f1d") == (2, [])
    assert not (tmp_path / "runs").exists()
    assert plan.run(tmp_path, "card", commit="0" * 40)[1] == [["card-1", "done"]]
    assert (tmp_path / "runs" / "commit.txt").read_text() == "0" * 40 + "\n"


def test_the_commands_of_the_plan_name_recipes_settings_and_scripts_that_exist(plan: Program) -> None:
    _, lines, _ = plan(*plan.minutes(), "--print")
    for recipe, rest in re.findall(r"longspan train --recipe (\S+)([^;&|\n]*)", lines):
        words = shlex.split(rest)
        load_recipe(recipe, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
    scripts = set(re.findall(r" ((?:benchmarks|tests)/\S+)", lines))
    assert scripts
    assert [name for name in scripts if not any(ROOT.glob(name))] == []
    assert not re.search(r"\{(?!print)[a-z]+\}", lines)


def test_every_run_fits_into_half_an_hour_of_one_machine(plan: Program) -> None:
    minutes = plan.minutes()
    assert minutes
    assert {name: count for name, count in minutes.items() if count > 28} == {}


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("minutes = 3\n", "", "run[1].minutes is missing"),
        ("minutes = 3\n", "minutes = 3\nsecond = 2\n", "run[1].second"),
        ("[texts]", "[text]", "'text'"),
        ("minutes = 3\n", "minutes = 3\ntexts = ['none']\n", "text none"),
        ('["true"]', f"['true', {['true'] * 27}]", "step 2 of the run long has 27 commands"),
        ('["true"]', "[[]]", "step 1 of the run long has 0 commands"),
    ],
)
def test_a_plan_that_cannot_be_read_is_one_sentence(
    before: str, after: str, named: str, tmp_path: Path, plan: Program
) -> None:
    code, _, errors = plan("--plan", str(tmp_path / "none.toml"))
    assert code == 2
    assert "none.toml; check the name" in errors
    given = arguments(tmp_path)
    (tmp_path / "plan.toml").write_text((PLAN % "true").replace(before, after))
    code, _, errors = plan(*given)
    assert (code, named in errors) == (2, True), errors


@pytest.mark.parametrize("options", [{"limit": -5}, {"limit": 0}, {"limit": "nan"}, {"grace": -1}])
def test_times_that_leave_nothing_to_run_are_refused(options: dict[str, Any], tmp_path: Path, plan: Program) -> None:
    assert plan.run(tmp_path, "first", **options)[0] == 2
    assert not (tmp_path / "runs").exists()
