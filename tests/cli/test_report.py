"""`longspan report`: one HTML file about a run."""

from pathlib import Path

import pytest

from .conftest import Cli


@pytest.fixture
def run(cli: Cli, model: Path, text: Path) -> Path:
    """A model in the folder of a run without metrics."""
    folder = Path("run")
    folder.mkdir()
    model.rename(folder / "best")
    (folder / "recipe.toml").write_text(f'[model]\nfamily = "transformer-xl"\n[data]\ncorpus = "{text}"\n')
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_one_file(cli: Cli, run: Path) -> None:
    result = cli("report", run, "--out", "r.html")
    assert (result.code, result.err, result.out) == (0, "", "the report is in r.html\n")
    html = Path("r.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "No run has written metrics yet." in html
    assert not list(Path().glob(".r.html*"))


def test_wrong_use_is_one_sentence(cli: Cli, run: Path, text: Path) -> None:
    cli("report", "--out", "r.html").refused("RUN")
    cli("report", run).refused("--out")
    cli("report", "nowhere", "--out", "r.html").refused("nowhere", "recipe.toml")
    cli("report", run, "--out", "no/where.html").refused("--out no/where.html")
    cli("report", run, "--out", run).refused("--out run")
    cli("report", run, "./run", "--out", "r.html").refused("run", "twice")
    assert not Path("r.html").exists()
