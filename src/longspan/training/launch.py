"""A launch by torchrun: which processes belong together, and what processes before a restart have left.

torchrun starts the processes of a node again after a fault. It counts restarts on each node by itself, and a node that
comes back counts from zero. So the count cannot tell processes before a restart from those after it. The store of
torchrun outlives a restart; the processes use it to agree on a round.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

PREFIX, ROUNDS = "longspan", "rounds"
PATIENCE = timedelta(minutes=30)
"""How long the first process waits for the others, as long as torch does."""


def launched() -> bool:
    """Whether `torchrun` started this process."""
    return dist.is_torchelastic_launched() and "RANK" in os.environ


def is_first() -> bool:
    """Whether this is the first process that torchrun started, or the only one."""
    return not launched() or os.environ["RANK"] == "0"


def agree_on_round(store: dist.Store, rank: int, size: int, patience: timedelta = PATIENCE) -> int:
    """A number that all running processes have in common, and that no earlier ones had.

    The first process takes the next number. Each of the others asks for it under a new key, because the store may
    contain answers to the processes before it. The first process answers what was asked last until all have confirmed.
    """
    if rank:
        question = store.add(f"asked/{rank}", 1)
        number = int(store.get(f"answer/{rank}/{question}"))
        store.set(f"joined/{number}/{rank}", "")
        return number
    number, missing, deadline = store.add(ROUNDS, 1), list(range(1, size)), time.monotonic() + patience.total_seconds()
    while missing:
        for other in missing:
            store.set(f"answer/{other}/{store.add(f'asked/{other}', 0)}", str(number))
        missing = [other for other in missing if not store.check([f"joined/{number}/{other}"])]
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"process {missing[0]} did not join")
        time.sleep(0.01 if missing else 0)
    return number


def restart_count() -> int:
    """How often torchrun has started the processes of this node again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def started_before(store: dist.Store | None, out: Path, restarts: int) -> bool:
    """Whether this launch has started or continued the run in `out` before a restart. `restarts` is the highest count
    of all nodes. It is the second choice, because torchrun also restarts a launch whose folder was refused."""
    if store is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the store ends with the processes
        return restarts > 0
    return store.check([_started(out)])


def remember_start(store: dist.Store | None, out: Path) -> None:
    if store is not None:
        store.set(_started(out), "")


def _started(out: Path) -> str:
    return f"started/{out.resolve()}"


def is_first_to_report() -> bool | None:
    """Whether no other process of this round has asked this. None if the store does not answer."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        server = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        store = dist.PrefixStore(PREFIX, server)
        return store.add(f"errors/{store.add(ROUNDS, 0)}", 1) == 1
    except (KeyError, RuntimeError):
        return None
