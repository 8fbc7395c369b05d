"""Runs that torchrun starts: a small recipe and text, the launch, and the processes to kill."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from longspan.training.observers.metrics import read_lines

REPOSITORY = Path(__file__).parents[2]
RECIPE = """
[model]
family = "transformer-xl"
layers = 2
width = 16
heads = 2
inner = 24
dropout = 0.2
[training]
batch = 4
segment = 8
memory = 12
lr = 0.01
save_every = 2
"""


def write_inputs(folder: Path, recipe: str = RECIPE) -> None:
    """small.toml and the folder text."""
    folder.mkdir(exist_ok=True)
    (folder / "small.toml").write_text(recipe)
    (folder / "text").mkdir()
    (folder / "text/one.txt").write_text("the quick brown fox jumps over a lazy dog.\n" * 60)


def start(
    launch: Sequence[str], train: Sequence[str], log: Path, place: Path = REPOSITORY, **environment: str
) -> "subprocess.Popen[str]":
    """Start torchrun with the flags `launch`, and `longspan train` with the flags `train`."""
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "longspan", "train", "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR", **environment}
    with log.open("a") as output:
        return subprocess.Popen([*command, *train], cwd=place, env=environment, stdout=output, stderr=output, text=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def node_flags(port: int, restarts: int = 0) -> list[str]:
    """The flags of each torchrun of two nodes with one process each."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"]
    return ["--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}", *rendezvous]


def workers(launcher: "subprocess.Popen[str]") -> list[int]:
    try:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in children]


def kill_node(launcher: "subprocess.Popen[str]") -> None:
    """Kill the processes of a node and torchrun itself."""
    for process in [*workers(launcher), launcher.pid]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    launcher.wait()


def wait_for_rows(run: Path, rows: int, seconds: float = 120) -> None:
    """Wait until metrics.jsonl has more than so many rows."""
    deadline = time.monotonic() + seconds
    while len(read_lines(run / "metrics.jsonl")) <= rows:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_port(port: int, seconds: float = 60) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(ConnectionError), socket.create_connection(("localhost", port)):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing answers at port {port}")


def wait_for_restart(launchers: "Sequence[subprocess.Popen[str]]", before: Sequence[int], seconds: float = 120) -> None:
    """Wait until torchrun has replaced the processes `before`, so that the next kill is a fault of its own."""
    deadline = time.monotonic() + seconds
    while any(worker in before for launcher in launchers for worker in workers(launcher)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def errors(log: Path) -> list[str]:
    """What longspan itself printed as an error."""
    return [line for line in log.read_text().splitlines() if line.startswith("longspan:")]
