"""CONTRIBUTING.md, followed step by step: a family in another package works everywhere."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from longspan.training.recipe import load_recipe
from tests.programs import install

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
INSTALLED = """
import sys
from longspan.models import families
sys.path.insert(0, {site!r})
families.known_families.cache_clear()
"""
UNDRAWN = """
import contextlib
with contextlib.suppress(ImportError):
    from matplotlib.figure import Figure
    Figure.savefig = lambda _, path, **__: path.write_text('<svg width="72pt" height="72pt"></svg>')
"""
"""The report of a comparison has figures. They are made but not rendered, which takes most of their time."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The package of the page as `pip install` leaves it: its module, and its metadata with the entry point."""
    (source,), (project, _) = blocks("python"), blocks("toml")
    assert len(source.splitlines()) < 80
    described = tomllib.loads(project)["project"]
    metadata = tmp_path / "site" / "longspan_alibi-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata.parent / "longspan_alibi.py").write_text(source)
    (metadata / "METADATA").write_text(f"Name: {described['name']}\nVersion: {described['version']}\n")
    entries = "".join(f"{k} = {v}\n" for k, v in described["entry-points"]["longspan.families"].items())
    (metadata / "entry_points.txt").write_text(f"[longspan.families]\n{entries}")
    return metadata.parent


@pytest.mark.slow
def test_the_steps_of_contributing_work(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == len(FAST)
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT / "src"), str(ROOT)]))
    (tmp_path / "small.txt").write_text("A report of a short text is made quickly. " * 150)
    install(tmp_path / "bin", first=INSTALLED.format(site=str(site)))
    install(tmp_path / "undrawn", first=INSTALLED.format(site=str(site)) + UNDRAWN)
    for command in commands:
        (options,) = (extra for start, extra in FAST.items() if command.startswith(start))
        tests = command.startswith("pytest")
        folder = "undrawn" if command.startswith("longspan compare") else "bin"
        program, where = (f"{sys.executable} -m ", ROOT) if tests else (f"{tmp_path}/{folder}/", tmp_path)
        done = subprocess.run(
            f"{program}{command} {options}", shell=True, cwd=where, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        if command.startswith(("longspan bench", "longspan compare")):
            assert "alibi" in done.stdout
        if tests:
            assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20  # type: ignore[index]


@pytest.mark.parametrize("family", ["lstm", "qrnn", "vanilla"])
def test_the_recipe_of_contributing_fits_a_family_without_heads_or_memory(family: str, tmp_path: Path) -> None:
    (tmp_path / "glr.toml").write_text(blocks("toml")[1].replace("glr", family), encoding="utf-8")
    assert load_recipe(tmp_path / "glr.toml").family == family
