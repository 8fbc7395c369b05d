"""`longspan write`, with lines typed into prompt_toolkit's pipe input."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Result

pytest.importorskip("prompt_toolkit")


def typed(cli: Cli, *args: object, lines: list[str]) -> Result:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
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
    assert "...It was\n" in out  # the continuation was undone
    assert "now on branch draft" in out
    assert "  main: 6 characters" in out
    assert "* draft: 11 characters, ...'It was done'" in out
    assert "memory = 8" in out
    assert "\nIt was done\n" in out
    again = typed(cli, model, "--load", "d.json", lines=["/settings", "/switch main", "/show", "/quit"])
    assert "memory = 8" in again.out
    assert again.out.endswith("...It was\nIt was\n")


def test_errors_are_one_line_and_the_session_goes_on(cli: Cli, model: Path) -> None:
    lines = ["/udno", "/set memory -1", "/set", "/load none.txt", "/switch x y", "/help", "/quit"]
    found = typed(cli, model, "-n", 5, lines=lines)
    assert found.code == 0
    errors = [line for line in found.out.splitlines() if line.startswith("longspan: ")]
    assert len(errors) == 5, found.out
    for error, word in zip(errors, ["/undo", "memory=-1", "/set KEY VALUE", "none.txt", "/switch NAME"], strict=True):
        assert word in error
    assert "Ctrl-D" in found.out


def test_without_prompt_toolkit(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prompt_toolkit", None)
    cli("write", model).refused("prompt_toolkit", "longspan[write]")
