"""The commands and the Python of the README, run as pasted. Only sizes are reduced: of the trained
model, its steps, the generated text and the memory."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.bundled import is_installed
from tests.programs import install

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHORTER = {
    "train": [
        part
        for key in ("training.steps=12", "training.validate_every=0", "model.layers=1", "model.width=32")
        for part in ("--set", key)
    ],
    "generate": ["-n", "20"],
    "eval": ["--streams", "64", "--memory", "64", "--json"],
}


def commands() -> list[list[str]]:
    """Every `longspan ...` line of a code block, fenced or indented, without comments."""
    found, fenced = [], False
    for line in README.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        command = line if fenced else line.removeprefix("    ")
        if (fenced or line.startswith("    ")) and command.startswith("longspan "):
            found.append(shlex.split(command, comments=True))
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `longspan` and `python`."""
    install(folder := tmp_path_factory.mktemp("bin"))
    return folder


def run_command(words: list[str], programs: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [programs / words[0], *words[1:], *SHORTER.get(words[1], [])]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not is_installed(), reason="no bundled model; make bundled RUN=... makes it")
@pytest.mark.slow
def test_the_commands_of_the_readme(programs: Path, tmp_path: Path) -> None:
    found = commands()
    assert {words[1] for words in found} >= {"train", "eval", "generate"}
    for words in found:
        done = run_command(words, programs, tmp_path)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout


@pytest.mark.skipif(not is_installed(), reason="no bundled model; make bundled RUN=... makes it")
@pytest.mark.slow
def test_the_first_command_of_the_readme_uses_the_bundled_model(programs: Path, tmp_path: Path) -> None:
    first = next(words for words in commands() if words[1] == "generate" and words[2].startswith("-"))
    done = run_command(first, programs, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(first[first.index("-p") + 1])
    assert "the bundled model" in done.stderr


@pytest.mark.skipif(not is_installed(), reason="no bundled model; make bundled RUN=... makes it")
@pytest.mark.slow
def test_the_python_of_the_readme_prints_what_the_readme_shows(programs: Path, tmp_path: Path) -> None:
    block, shown = (README.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "text"))
    done = subprocess.run([programs / "python", "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed, expected = (re.findall(r"^(\d+) (\d\.\d+) bits", text, re.MULTILINE) for text in (done.stdout, shown))
    assert len(expected) == 3
    assert [memory for memory, _ in printed] == [memory for memory, _ in expected]
    for (_, found), (_, bits) in zip(printed, expected, strict=True):
        assert abs(float(found) - float(bits)) < 0.003


def test_the_readme_lists_every_verb() -> None:
    table = README.partition("| verb |")[2].partition("\n\n")[0]
    first_cells = "\n".join(row.split("|")[1] for row in table.splitlines() if "|" in row)
    listed = set(re.findall(r"`(?:longspan )?([a-z-]+)`", first_cells))
    program = [sys.executable, "-m", "longspan.cli.main", "--help"]
    shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    verbs = set(re.findall(r"^  ([a-z][a-z-]*)  ", shown, re.MULTILINE))
    assert listed == verbs
