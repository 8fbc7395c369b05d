"""Verbs without a MODEL: they do what they do with the one in the box named, and say so in a line of their own."""

import io
import shutil
import sys
from pathlib import Path

import pytest

import longspan

from .conftest import Cli

LINE = "longspan: no MODEL was named; this is the one in the box, trained on English novels\n"


@pytest.fixture
def box(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A box with a small model in it."""
    folder = tmp_path / "box"
    shutil.copytree(model, folder)
    monkeypatch.setattr("longspan.box.FOLDER", folder)
    return folder


@pytest.mark.parametrize(
    "verb", ["generate -p Once -n 20", "eval --data text.txt", "eval --data text.txt --json", "info"]
)
def test_what_a_verb_prints_is_as_if_the_box_were_named(cli: Cli, box: Path, text: Path, verb: str) -> None:
    first, *flags = verb.split()
    unnamed, named = cli(first, *flags), cli(first, box, *flags)
    assert (unnamed.code, unnamed.err) == (0, LINE)
    assert named.err == ""

    def lasting(out: str) -> list[str]:
        """All but how fast it was."""
        return [part for line in out.splitlines() for part in line.split(", ") if "second" not in part]

    assert lasting(unnamed.out) == lasting(named.out) != []


def test_a_lone_dash_is_standard_input(cli: Cli, box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once more")))
    read = cli("generate", "-", "-n", 9, "--temp", 0)
    assert (read.out, read.err) == (cli("generate", box, "-p", "Once more", "-n", 9, "--temp", 0).out, LINE)
    assert longspan.load().generate("Once more", 9, temperature=0.0) == read.out[len("Once more") : -1]


def test_a_prompt_in_the_place_of_the_model(cli: Cli, box: Path, text: Path) -> None:
    cli("generate", "Once upon a time").refused("'Once upon a time'", "put -p before it")
    cli("generate", "Once " * 99).refused("put -p before it")
    cli("generate", "Once", "upon").refused("'upon' is no prompt")
    cli("generate", text).refused(f"--prompt-file {text}")
    cli("generate", "nowhere", "-p", "a").refused("there is no folder", "nowhere")


def test_wrong_use_stays_one_sentence(cli: Cli, box: Path) -> None:
    """The line about the box is not put before it."""
    cli("generate", "-p", "a", "-n", -1).refused("-n")
    cli("generate", "-p", "a", "--load-state", "none.state").refused("none.state")
    cli("eval").refused("--data")
    cli("pictures", "--data", "none.txt", "--out", "drawn").refused("none.txt")
    cli("recl", "--data", "none.txt").refused("none.txt")
    cli("eval", "--data", "none.txt").refused("none.txt")
    Path("empty.txt").touch()
    cli("eval", "--data", "empty.txt").refused("empty.txt")


def test_an_empty_box_says_so(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.box.FOLDER", tmp_path / "nothing")
    drawn = ["pictures", "--data", "stdlib", "--out", "drawn"]
    for verb in (["generate", "-p", "a"], ["info"], ["eval", "--data", "stdlib"], ["recl", "--data", "stdlib"], drawn):
        cli(*verb).refused("no model was named", "name a model folder or a run")
