"""CPU threads: how many, how they wait for each other, and work that Ctrl-C can interrupt.

A step of a small model is a few hundred short parallel regions. At the end of each one, threads wait for the slowest.
By default they spin for milliseconds. Beside other work a spinning thread uses up the time of the thread it waits for,
and two threads run at a tenth of the speed of one. So threads sleep while they wait, and only free cores get a thread.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STATISTICS = Path("/proc/stat")
SHORTEST = 0.2
"""Seconds over which the use of the cores is measured, at least."""
_INTERRUPTIBLE, _WAIT_SECONDS = "longspan-interruptible", 0.1


_start: "CoreUse | None" = None


def prepare_threads() -> None:
    """Let threads sleep instead of spin while they wait, and begin to measure which cores are free.

    For a program's first lines: OpenMP reads the policy once, when torch is imported. Settings of the user are kept.
    """
    global _start
    _start = CoreUse.now()
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        # The first is for GNU's OpenMP, which torch uses on Linux, the second for those of Intel and LLVM.
        os.environ |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


class CoreUse(NamedTuple):
    """CPU time so far, in seconds."""

    clock: float
    others: float
    """Of all processes but this one, on the cores that this process may use."""

    @classmethod
    def now(cls) -> "CoreUse | None":
        """None if the system does not tell, as on macOS."""
        try:
            lines = STATISTICS.read_text(encoding="ascii").splitlines()
            rows = {name: [int(n) for n in rest] for name, *rest in map(str.split, lines) if name.startswith("cpu")}
            # user, nice, system, idle, iowait, irq, softirq, steal
            ticks = sum(sum(rows[f"cpu{core}"][:8]) - sum(rows[f"cpu{core}"][3:5]) for core in cores())
            busy = ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, LookupError, AttributeError):
            return None
        own = os.times()
        return cls(time.monotonic(), busy - own.user - own.system)


def cores() -> set[int]:
    """The cores that this process may use."""
    return os.sched_getaffinity(0)


def free_cores(since: CoreUse) -> int | None:
    """The number of cores that other processes have left free since then, at least 1; None if the system does not
    tell."""
    time.sleep(max(0.0, since.clock + SHORTEST - time.monotonic()))
    after = CoreUse.now()
    if after is None:
        return None
    used = (after.others - since.others) / (after.clock - since.clock)
    return max(1, min(len(cores()), round(len(cores()) - used)))


def set_threads(threads: int = 0, since: CoreUse | None = None) -> None:
    """Set the number of threads of torch. 0 is one for every core that is free since then (default: since
    `prepare_threads`); OMP_NUM_THREADS takes precedence, and a program that prepared nothing keeps torch's choice."""
    import torch

    since = since or _start
    if not threads and since is not None and "OMP_NUM_THREADS" not in os.environ:
        threads = free_cores(since) or 0
    if threads:
        torch.set_num_threads(min(threads, 1024))


def run_interruptibly(work: Callable[[], object]) -> None:
    """Run `work` in a thread, so that Ctrl-C is handled at once. A library may handle it only when it has finished.

    After Ctrl-C the thread is abandoned: it runs on until it is done or the process ends.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=_INTERRUPTIBLE, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_WAIT_SECONDS)  # a signal that another thread receives does not end a wait without a limit
    if errors:
        raise errors[0]


def has_abandoned_threads() -> bool:
    """Whether a thread of `run_interruptibly` still runs."""
    return any(thread.name == _INTERRUPTIBLE for thread in threading.enumerate())
