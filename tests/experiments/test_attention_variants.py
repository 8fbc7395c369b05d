"""benchmarks/attention_variants.py: variants that fail in a process of their own are not measured."""

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


def test_variants_that_fail_or_never_end_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = importlib.import_module("attention_variants")
    jobs = []

    def run(command: list[str], *, timeout: float, **_: Any) -> "subprocess.CompletedProcess[bytes]":
        jobs.append(command[-1])
        if command[-1] == "2048:twice":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, int(command[-1] in ("512:by-distance", "2048:stored")))

    monkeypatch.setattr(program.subprocess, "run", run)
    variants = ["today", "twice", "stored", "ring-416", "by-distance", "table+stored"]
    working = program.compile_all(["512", "2048"], variants)
    assert working == {
        "512": ["today", "twice", "stored", "ring-416", "table+stored"],
        "2048": ["today", "by-distance", "table+stored"],  # a ring of another size is the same kernel
    }
    assert sorted(jobs) == sorted(
        f"{shape}:{name}"
        for shape in ("512", "2048")
        for name in ("flex", "today", "twice", "stored", "by-distance", "table+stored")
    )
    assert capsys.readouterr().out.splitlines() == [
        f"{job} failed and is left out" for job in ("512:by-distance", "2048:twice", "2048:stored")
    ]
