"""The README's commands, run as they stand there: a run of fewer steps, everything else to the letter."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.box import is_filled

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def commands() -> list[list[str]]:
    """Every `longspan ...` line of the README's first section, comments aside."""
    section = README.partition("## In a few minutes")[2].partition("\n## ")[0]
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (longspan .*)$", section, re.MULTILINE)]


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    lines = commands()
    assert [line[1] for line in lines] == ["train", "eval", "generate"]
    for line in lines:
        if line[1] == "train":
            line += ["--set", "training.steps=12", "--set", "training.validate_every=0"]
        if line[1] == "generate":
            line[line.index("-n") + 1] = "20"
        if line[1] == "eval":
            line += ["--lanes", "64", "--json"]
        program = [sys.executable, "-m", "longspan.cli.main", *line[1:]]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout


@pytest.mark.skipif(not is_filled(), reason="the box is empty; make box RUN=... fills it")
@pytest.mark.slow
def test_the_first_command_of_the_readme(tmp_path: Path) -> None:
    line = re.findall(r"^    (longspan .*)$", README, re.MULTILINE)[0]
    program = [sys.executable, "-m", "longspan.cli.main", *shlex.split(line)[1:], "-n", "20"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It was late in the evening when")
    assert "the box" in done.stderr


@pytest.mark.slow
def test_the_python_of_the_readme(tmp_path: Path) -> None:
    """The block as it stands, with a run made before it and tokens for its last two lines."""
    block = README.partition("```python\n")[2].partition("```")[0]
    begin = "import torch\ntokens = targets = torch.zeros(1, 4, dtype=torch.int64); state = None\n"
    made = ["-m", "longspan.cli.main", "init", "--set", "model.layers=1", "--set", "model.width=32", "runs/tiny"]
    subprocess.run([sys.executable, *made], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", begin + block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_verbs_of_the_readme_are_those_of_the_command() -> None:
    table = README.partition("| verb |")[2].partition("\n\n")[0]
    listed = set(
        re.findall(
            r"`(?:longspan )?([a-z]+)`", "\n".join(row.split("|")[1] for row in table.splitlines() if "|" in row)
        )
    )
    program = [sys.executable, "-m", "longspan.cli.main", "--help"]
    shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    verbs = set(re.findall(r"^  ([a-z]+)  ", shown.partition("Commands:")[2], re.MULTILINE))
    assert listed == verbs
