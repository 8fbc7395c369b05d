"""CONTRIBUTING.md, followed step by step: a family in another package works everywhere."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from longspan.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FAST = {
    "longspan train": "--set training.steps=20 --set training.validate_every=10 --set training.validate_tokens=2048 "
    "--set model.layers=2 --set model.width=32 --set model.heads=2 --set model.inner=32",
    "longspan eval": "--memory 32 --streams 128",
    "longspan generate": "",
    "longspan bench families": "--preset small --lengths 32,64 --json",
    "longspan compare": "--data small.txt --budget steps=4 --tokens 1024 --contexts 8:16:8 --targets 20 --json",
    "pytest": "-n 0 -x --hypothesis-seed 0",
}
"""Options that make a command of the page small enough for a test."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The package of the page as `pip install` leaves it: its module, and its metadata with the entry point."""
    site = tmp_path_factory.mktemp("site")
    (source,), (project, _) = blocks("python"), blocks("toml")
    assert len(source.splitlines()) < 80
    described = tomllib.loads(project)["project"]
    (site / "longspan_alibi.py").write_text(source)
    metadata = site / "longspan_alibi-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {described['name']}\nVersion: {described['version']}\n")
    entries = "".join(f"{k} = {v}\n" for k, v in described["entry-points"]["longspan.families"].items())
    (metadata / "entry_points.txt").write_text(f"[longspan.families]\n{entries}")
    path = os.pathsep.join([str(site), str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "LONGSPAN_CACHE": str(site / "cache"), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_steps_of_contributing_work(environment: dict[str, str], tmp_path: Path) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == len(FAST)
    program = f"{sys.executable} -m "
    (tmp_path / "small.txt").write_text("A report of a short text is made quickly. " * 150)
    for command in commands:
        (options,) = (extra for start, extra in FAST.items() if command.startswith(start))
        where = ROOT if command.startswith("pytest") else tmp_path
        done = subprocess.run(
            f"{program}{command} {options}", shell=True, cwd=where, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        if command.startswith(("longspan bench", "longspan compare")):
            assert "alibi" in done.stdout
        if command.startswith("pytest"):
            assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20  # type: ignore[index]


@pytest.mark.parametrize("family", ["lstm", "qrnn", "vanilla"])
def test_the_recipe_of_contributing_fits_a_family_without_heads_or_memory(family: str, tmp_path: Path) -> None:
    (tmp_path / "glr.toml").write_text(blocks("toml")[1].replace("glr", family), encoding="utf-8")
    assert load_recipe(tmp_path / "glr.toml").family == family
