"""benchmarks/decoding_paths.py: what a session delivers, and settings that fail."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


def test_only_settings_that_do_not_work_are_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program: Any = importlib.import_module("decoding_paths")

    class Session:
        def write(self, count: int, _: object) -> Iterator[int]:
            return iter(range(count))

    def milliseconds(call: Callable[[], int]) -> float:
        return 1.0 + call()

    monkeypatch.setattr(program, "open_session", lambda *_: Session())
    monkeypatch.setattr(program, "milliseconds", milliseconds)
    program.report("a session", lambda: program.delivered(None, None, 0))

    def fail(error: Exception) -> Any:
        raise error

    program.report("large tiles", lambda: fail(program.TritonError("out of shared memory")))
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(maxsplit=2)[2] for row in rows] == ["1,000", "failed: TritonError out of shared memory"]
    with pytest.raises(NameError):
        program.report("a mistake", lambda: fail(NameError("sys")))
