"""Training speed with one thread and with all, on a machine as it is and beside two busy processes.

    python benchmarks/threads.py --rounds 8 > benchmarks/results/DATE-threads.json

Every variant is a process of its own, because OpenMP reads its settings once. The processes take turns, one short
measurement each per round, so that other work on the machine slows all of them alike. Ratios are to one thread in the
same round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
CORES = len(os.sched_getaffinity(0))
# Number of threads (None: what longspan chooses) and whether longspan sets the wait policy.
VARIANTS: dict[str, tuple[int | None, bool]] = {
    "one thread": (1, False),
    "all threads, spinning": (CORES, False),
    "all threads, passive": (CORES, True),
    "as longspan chooses": (None, True),
}


def serve(threads: int | None, ours: bool) -> None:
    """Take training steps for as many seconds as each line of standard input says; print tokens per second."""
    sys.path.insert(0, str(SOURCE))
    from longspan.threads import CoreUse, prepare_threads, set_threads

    if ours:
        prepare_threads()
    import numpy as np
    import torch

    from longspan.data import Encoded
    from longspan.tokenizers import ByteTokenizer
    from longspan.training import run
    from longspan.training.recipe import load_recipe

    ids = np.random.default_rng(1).integers(0, 256, 1_000_000, dtype=np.uint8)
    text = Encoded("random bytes", "train", ids, np.array([0]), ByteTokenizer(), "", len(ids))
    torch.set_num_threads(threads or 1)
    _, trainer = run.make_trainer(load_recipe("demo"), text, torch.device("cpu"))
    for _ in range(3):
        trainer.take_step()
    for line in sys.stdin:
        if threads is None:  # from the load just before its turn: since its last turn the other variants ran
            set_threads(since=CoreUse.now())
        began, tokens = time.perf_counter(), trainer.tokens
        while time.perf_counter() - began < float(line):
            trainer.take_step()
        speed = (trainer.tokens - tokens) / (time.perf_counter() - began)
        print(json.dumps({"speed": speed, "threads": torch.get_num_threads()}), flush=True)


class Worker:
    def __init__(self, name: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in OPENMP}
        command = [sys.executable, __file__, "--serve", name]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def measure(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(seconds, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def measure(workers: dict[str, Worker], rounds: int, seconds: float) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    names = list(workers)
    for k in range(rounds):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            found[name].append(workers[name].measure(seconds))
    one = [each["speed"] for each in found["one thread"]]
    return {
        name: {
            "threads": sorted({each["threads"] for each in rows}),
            "tokens_per_second": round(statistics.median(each["speed"] for each in rows)),
            "ratio_to_one_thread": round(
                statistics.median(each["speed"] / base for each, base in zip(rows, one, strict=True)), 3
            ),
        }
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    if given.serve:
        serve(*VARIANTS[given.serve])
        return
    workers = {name: Worker(name) for name in VARIANTS}
    busy: list[subprocess.Popen[bytes]] = []
    try:
        for worker in workers.values():
            worker.measure(0.1)
        load = {"as it is": os.getloadavg()[0]}
        results = {"as it is": measure(workers, given.rounds, given.seconds)}
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        time.sleep(3)
        results["beside two busy processes"] = measure(workers, given.rounds, given.seconds)
        load["beside two busy processes"] = os.getloadavg()[0]
    finally:
        for process in [*busy, *(worker.process for worker in workers.values())]:
            process.kill()
    about = {"cores": CORES, "rounds": given.rounds, "seconds": given.seconds, "load_average": load}
    print(json.dumps(about | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
