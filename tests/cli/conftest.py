"""Runs the command line in this process and returns its exit code, standard output and standard error."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.main import run


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)

    def refused(self, *words: str) -> None:
        """Exit code 2 and one error line that contains these words. Progress lines may come before it."""
        assert self.code == 2, (self.out, self.err)
        errors = [line for line in self.err.splitlines() if not line.startswith(("reading ", "preparing "))]
        assert [line.startswith("longspan: ") for line in errors] == [True], self.err
        for word in words:
            assert word in errors[0], self.err


Cli = Callable[..., Result]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs a command line in `tmp_path`, with an empty cache folder and, on slow machines too, no progress lines."""
    monkeypatch.setattr("longspan.terminal.PLAIN_SECONDS", 3600.0)
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Result:
        capfd.readouterr()
        code = run([str(arg) for arg in args])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return call


SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "reading.segment=16", "reading.memory=40"]


@pytest.fixture
def model(cli: Cli) -> Path:
    """A small untrained model on bytes."""
    sets = [part for setting in SMALL for part in ("--set", setting)]
    assert cli("init", *sets, "m").code == 0
    return Path("m")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes("So it was done, as it had been said: naïve, 猫, ~.\n".encode() * 12)
    return path
