"""The number of threads follows the cores that others leave free."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from longspan import threads
from longspan.threads import (
    CoreUse,
    free_cores,
    has_abandoned_threads,
    prepare_threads,
    run_interruptibly,
    set_threads,
)
from longspan.training.folder import recorded_threads


def test_core_use_is_the_cpu_time_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By hand: 100 ticks are a second. Idle and iowait do not count, nor do guests, which are part of user."""
    monkeypatch.setattr(threads, "STATISTICS", tmp_path / "stat")
    monkeypatch.setattr(threads, "cores", lambda: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    rows = ["cpu 9 9 9 9", "cpu0 100 20 30 999 999 1 2 3 50 0", "cpu1 5 5 5 5", "cpu2 1000 0 0 7 0 0 0 0 0 0", "intr 3"]
    (tmp_path / "stat").write_text("\n".join(rows))
    found, own = CoreUse.now(), os.times()
    assert found is not None
    assert found.others == pytest.approx(1.56 + 10.0 - own.user - own.system, abs=0.5)
    (tmp_path / "stat").write_text("cpu0 1 2 x")
    assert CoreUse.now() is None


@pytest.mark.parametrize(
    ("used", "total", "free"), [(0.0, 2, 2), (0.4, 2, 2), (1.0, 2, 1), (2.0, 2, 1), (2.0, 16, 14), (-0.3, 4, 4)]
)
def test_free_cores(monkeypatch: pytest.MonkeyPatch, used: float, total: int, free: int) -> None:
    now = time.monotonic()
    monkeypatch.setattr(threads, "cores", lambda: set(range(total)))
    monkeypatch.setattr(CoreUse, "now", classmethod(lambda cls: CoreUse(now + 2.0, 7.0 + 2.0 * used)))
    assert free_cores(CoreUse(now, 7.0)) == free


def test_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_start", None)
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ["KMP_BLOCKTIME"] = "200"
    prepare_threads()
    assert "OMP_WAIT_POLICY" not in os.environ
    del os.environ["KMP_BLOCKTIME"]
    prepare_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    before, chosen = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(threads, "free_cores", lambda since: 5)
    set_threads()
    set_threads(3)
    os.environ["OMP_NUM_THREADS"] = "2"
    set_threads()
    assert chosen == [5, 3]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"processes": [{"device": "cpu", "threads": 8}, {"device": "cpu", "threads": 2}]}, 2),
        ({"processes": [{"device": "NVIDIA H200", "threads": 8}]}, 0),
        ({"processes": [{"device": "cpu", "threads": "2"}]}, 0),
        ({"processes": []}, 0),
        ({}, 0),
    ],
)
def test_a_resumed_run_keeps_its_threads(tmp_path: Path, about: object, expected: int) -> None:
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert recorded_threads(tmp_path) == expected


def test_interrupted_work_is_abandoned() -> None:
    """Ctrl-C is handled although the work goes on, as in a library that does not look for it."""
    began, end = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        end.wait(30)

    sender = threading.Thread(target=lambda: (began.wait(30), os.kill(os.getpid(), signal.SIGINT)))
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(work)
    assert has_abandoned_threads()
    end.set()
    sender.join()
    with pytest.raises(ZeroDivisionError):
        run_interruptibly(lambda: 1 / 0)
