"""The wheel, installed outside of the checkout: it has everything that commands need."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Built-in pages of the manual, recipes, the bundled model and the marker of typed packages.
CONTENTS = ["docs/training.md", "recipes/tiny.toml", "bundled/novels/model.safetensors", "py.typed"]
COMMANDS = """
from longspan.cli.main import run
import longspan
assert longspan.__file__.startswith({site!r}), longspan.__file__
for line in ("--version", "recipes", "families", "docs training", "info", "generate -p It -n 5"):
    assert run(line.split()) == 0, line
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("dist")
    return Path(next(builder.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def test_the_wheel_is_complete(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"longspan/{name}" for name in CONTENTS} <= names
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert {name.removeprefix("src/") for name in tracked.splitlines()} <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_commands_work_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site), "LONGSPAN_CACHE": str(tmp_path / "cache")}
    program = COMMANDS.format(site=str(site))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "# Training" in done.stdout
