"""`longspan write`, with lines typed into prompt_toolkit's pipe input."""

import io
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest

from longspan.cli.write import Dialogue
from longspan.draft import Draft
from tests.cli.conftest import Cli, Result

pytest.importorskip("prompt_toolkit")


def typed(cli: Cli, *args: object, lines: list[str]) -> Result:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    terminal = patch("longspan.cli.write._on_terminal", lambda: True)
    with terminal, create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("".join(f"{line}\r" for line in lines))
        return cli("write", *args)


def test_a_session(cli: Cli, model: Path) -> None:
    lines = [
        "It was",
        "/undo",
        "/fork draft",
        "/add  done",
        "/branches",
        "/set memory 8",
        "/show",
        "/save d.json",
        "/quit",
    ]
    found = typed(cli, model, "-n", 5, lines=lines)
    assert found.code == 0, found.err
    out = found.out
    assert "\nIt was\n" in out  # the continuation was undone
    assert "now on branch draft" in out
    assert "  main: 6 characters" in out
    assert "* draft: 11 characters, 'It was done'" in out
    assert "memory = 8" in out
    assert "\nIt was done\n" in out
    again = typed(cli, model, "--load", "d.json", lines=["/settings", "/switch main", "/show", "/quit"])
    assert "memory = 8" in again.out
    assert again.out.endswith("\nIt was\nIt was\n")


def test_errors_are_one_line_and_the_session_goes_on(cli: Cli, model: Path) -> None:
    lines = [
        "/udno",
        "/set memory -1",
        "/set",
        "/load none.txt",
        "/switch x y",
        "/undo 3",
        "/add",
        "/save 'x",
        "/help",
        "/quit",
    ]
    found = typed(cli, model, "-n", 5, lines=lines)
    assert found.code == 0
    errors = [line for line in found.out.splitlines() if line.startswith("longspan: ")]
    assert len(errors) == 7, found.out
    named = ["/undo", "memory=-1", "/set KEY VALUE", "none.txt", "/switch NAME", "'/undo 3'", "/save FILE"]
    for error, word in zip(errors, named, strict=True):
        assert word in error
    assert not any("incomplete" in error for error in errors)
    assert "Ctrl-D" in found.out


def test_an_error_inside_a_command_is_not_blamed_on_the_line() -> None:
    class Faulty:
        def undo(self) -> bool:
            raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        Dialogue(cast("Draft", Faulty())).answer("/undo")


def test_lines_of_a_pipe(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt and no control sequences: only the answers. prompt_toolkit is not needed."""
    monkeypatch.setitem(__import__("sys").modules, "prompt_toolkit", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("It was\n/undo\n/add  done\n/show"))
    found = cli("write", model, "-n", 1)
    assert (found.code, found.err) == (0, "")
    assert found.out.endswith("\nIt was\nIt was done\n")
    assert "\x1b" not in found.out
    assert "main>" not in found.out


def test_a_line_of_the_text_ends_with_alt_enter(cli: Cli, model: Path) -> None:
    found = typed(cli, model, "-n", 1, lines=["It\x1b\rwas", "/undo", "/show", "/quit"])
    assert found.out.endswith("\nIt\nwas\nIt\nwas\n")


def test_without_prompt_toolkit(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prompt_toolkit", None)
    monkeypatch.setattr("longspan.cli.write._on_terminal", lambda: True)
    cli("write", model).refused("prompt_toolkit", "longspan[write]")
