"""Control characters from models, prompts and file names are escaped on a terminal."""

import json
import os
import pty
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from longspan.cli.main import run
from longspan.cli.options import print_json
from longspan.terminal import guarded_streams, progress_line, visible

from .conftest import Cli

HOSTILE = "a\x1b]0;title\x07b\x7f\x9b31mc\u202ed\re\n\tf é 猫 \u200b"
ESCAPED = "a\\x1b]0;title\\x07b\\x7f\\x9b31mc\\u202ed\\re\n\tf é 猫 \\u200b"

OnTerminal = Callable[..., tuple[int, str, str]]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Callable[[], str]]:
    """A pseudo-terminal as `sys.stdout` or `sys.stderr`. Yields a function that returns what was written."""
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8") as stream:  # noqa: PTH123 (a descriptor)
        monkeypatch.setattr(sys, name, stream)

        def read() -> str:
            stream.flush()
            os.set_blocking(master, False)
            content = b""
            while True:
                try:
                    content += os.read(master, 4096)
                except BlockingIOError:
                    return content.decode().replace("\r\n", "\n")

        yield read
    os.close(master)


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    def call(*args: object) -> tuple[int, str, str]:
        with monkeypatch.context() as patch, terminal(patch, "stdout") as out, terminal(patch, "stderr") as err:
            code = run([str(arg) for arg in args])
            return code, out(), err()

    return call


def test_generate_escapes_control_characters_of_the_prompt(cli: Cli, model: Path, on_terminal: OnTerminal) -> None:
    code, out, _ = on_terminal("generate", model, "-p", HOSTILE, "-n", 0)
    assert code == 0
    assert out == ESCAPED + "\n"


def test_generate_escapes_control_characters_of_the_model(cli: Cli, model: Path, on_terminal: OnTerminal) -> None:
    _, out, _ = on_terminal("generate", model, "-p", "a", "-n", 200, "--seed", 3)
    assert "\\x" in out
    assert out == visible(out)


def test_raw_output_is_not_escaped(cli: Cli, model: Path, on_terminal: OnTerminal) -> None:
    assert on_terminal("generate", model, "-p", HOSTILE, "-n", 0, "--raw")[1] == HOSTILE + "\n"


def test_output_to_a_pipe_is_not_escaped(cli: Cli, model: Path) -> None:
    assert cli("generate", model, "-p", HOSTILE.replace("\r", ""), "-n", 0).out == HOSTILE.replace("\r", "") + "\n"


def test_errors_are_escaped(cli: Cli, on_terminal: OnTerminal) -> None:
    code, _, err = on_terminal("info", "no\x1b[2Jwhere")
    assert code == 2
    assert "no\\x1b[2Jwhere" in err
    assert "\x1b" not in err


def test_tables_are_escaped(cli: Cli, on_terminal: OnTerminal, tmp_path: Path) -> None:
    """The names in a loss table may come from an untrusted file."""
    np.savez(tmp_path / "t.npz", names=np.array(["m\x1b[2J"]), contexts=np.array([1, 2]), losses=np.ones((1, 2, 9)))
    code, out, _ = on_terminal("recl", "--losses", tmp_path / "t.npz")
    assert code == 0
    assert "m\\x1b[2J" in out
    assert "\x1b" not in out


def test_progress_bars_are_drawn_and_errors_beside_them_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar needs control characters to move the cursor."""
    from longspan.cli.progress import progress

    monkeypatch.setenv("TERM", "xterm")
    with terminal(monkeypatch, "stderr") as read, guarded_streams():
        with progress("reading") as watch:
            assert watch is not None
            watch(1, 2)
            run(["info", "a\x1b[2Jb"])
        drawn = read()
    assert "\x1b[" in drawn
    assert "\\x1b[" not in drawn.replace("a\\x1b[2Jb", "")
    assert "a\\x1b[2Jb" in drawn


def test_without_a_terminal_progress_is_a_line_now_and_then(capfd: pytest.CaptureFixture[str]) -> None:
    """Also while a step takes long; and none after the end."""
    with progress_line("reading", every=0.05) as update:
        time.sleep(0.13)
        update(1, 4)
        time.sleep(0.13)
        update(5, None)
        time.sleep(0.08)
    time.sleep(0.1)
    lines = capfd.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 6
    assert lines[0] == "reading: 0:00 so far"
    assert [line for line in lines if line.startswith("reading: 25%, 0:0") and line.endswith(" left")]
    assert lines[-1] == "reading: 0:00 so far"


def test_a_piped_eval_prints_progress(cli: Cli, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.terminal.PLAIN_SECONDS", 0.01)
    found = cli("eval", model, "--data", text, "--json")
    assert [line for line in found.err.splitlines() if line.startswith("scoring: ")], found.err
    assert found.json["scored"] > 0


def test_json_has_null_for_numbers_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    nan, inf = float("nan"), float("inf")
    print_json({"a": nan, "rows": [{"b": -inf, "c": (1.5, inf)}], "d": {"e": [nan, "NaN", None, True]}})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": None, "rows": [{"b": None, "c": [1.5, None]}], "d": {"e": [None, "NaN", None, True]}}


def test_streams_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, "stdout"):
        before = sys.stdout, sys.stderr
        run(["--version"])
        assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("text", ["plain", "naïve 猫 👩‍👩‍👧", "می‌خواهم", "two\nlines\tand a tab", ""])
def test_ordinary_text_is_not_escaped(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize("code", [*range(9), *range(11, 32), *range(0x7F, 0xA0), 0xAD, 0x200B, 0x2028, 0x2066, 0xE0041])
def test_every_unsafe_character_is_escaped(code: int) -> None:
    escaped = visible(f"x{chr(code)}y")
    assert escaped.isprintable()
    assert escaped == visible(escaped)
