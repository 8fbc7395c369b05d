"""The command line in process: exit code, standard output, standard error."""

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
        """One sentence on standard error, exit code 2; before it a run says what it does."""
        assert self.code == 2, (self.out, self.err)
        told = [line for line in self.err.splitlines() if not line.startswith(("reading ", "preparing "))]
        assert [line.startswith("longspan: ") for line in told] == [True], self.err
        for word in words:
            assert word in told[0], self.err


Cli = Callable[..., Result]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Result:
        capfd.readouterr()
        code = run([str(arg) for arg in args])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return call


SMALL = ["layers=2", "width=32", "heads=2", "segment=16", "memory=40"]


@pytest.fixture
def model(cli: Cli) -> Path:
    """A small untrained model of bytes."""
    sets = [part for key in SMALL for part in ("--set", f"model.{key}")]
    assert cli("init", *sets, "m").code == 0
    return Path("m")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes("So it was done, as it had been said: naïve, 猫, ~.\n".encode() * 12)
    return path
