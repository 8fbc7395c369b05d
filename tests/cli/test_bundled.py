"""Commands without a MODEL use the bundled model, and say so in one line on standard error."""

import io
import shutil
import sys
from pathlib import Path

import pytest

import longspan
from longspan.bundled import ABOUT

from .conftest import Cli

LINE = f"longspan: using {ABOUT}\n"


@pytest.fixture
def bundled(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model in the place of the bundled one."""
    folder = tmp_path / "bundled"
    shutil.copytree(model, folder)
    monkeypatch.setattr("longspan.bundled.FOLDER", folder)
    return folder


@pytest.mark.parametrize(
    "command", ["generate -p Once -n 20", "eval --data text.txt", "eval --data text.txt --json", "info"]
)
def test_the_output_is_that_of_the_bundled_model(cli: Cli, bundled: Path, text: Path, command: str) -> None:
    verb, *flags = command.split()
    unnamed, named = cli(verb, *flags), cli(verb, bundled, *flags)
    assert (unnamed.code, unnamed.err) == (0, LINE)
    assert named.err == ""

    def without_times(out: str) -> list[str]:
        return [part for line in out.splitlines() for part in line.split(", ") if "second" not in part]

    assert without_times(unnamed.out) == without_times(named.out) != []


def test_a_dash_is_standard_input(cli: Cli, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once more")))
    piped = cli("generate", "-", "-n", 9, "--temp", 0)
    assert (piped.out, piped.err) == (cli("generate", bundled, "-p", "Once more", "-n", 9, "--temp", 0).out, LINE)
    assert longspan.load().generate("Once more", 9, temperature=0.0) == piped.out[len("Once more") : -1]


def test_a_prompt_in_the_place_of_the_model_is_refused(cli: Cli, bundled: Path, text: Path) -> None:
    cli("generate", "Once upon a time").refused("'Once upon a time'", "-p")
    cli("generate", "Once " * 99).refused("'Once ", "-p")
    cli("generate", "Once", "upon").refused("'upon'", "-p")
    cli("generate", text).refused(f"--prompt-file {text}")
    cli("generate", "nowhere", "-p", "a").refused("nowhere")


def test_an_error_does_not_mention_the_bundled_model(cli: Cli, bundled: Path) -> None:
    """`refused` checks that standard error is one line: the line about the bundled model is not printed before it."""
    cli("generate", "-p", "a", "-n", -1).refused("-n")
    cli("generate", "-p", "a", "--load-state", "none.state").refused("none.state")
    cli("eval").refused("--data")
    cli("figures", "--data", "none.txt", "--out", "drawn").refused("none.txt")
    cli("recl", "--data", "none.txt").refused("none.txt")
    cli("eval", "--data", "none.txt").refused("none.txt")
    Path("empty.txt").touch()
    cli("eval", "--data", "empty.txt").refused("empty.txt")


def test_without_a_bundled_model_a_model_must_be_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.bundled.FOLDER", tmp_path / "nothing")
    figures = ["figures", "--data", "stdlib", "--out", "drawn"]
    recl, evaluate = ["recl", "--data", "stdlib"], ["eval", "--data", "stdlib"]
    for command in (["generate", "-p", "a"], ["info"], evaluate, recl, figures):
        cli(*command).refused("bundled model", "use a model folder or a run")
