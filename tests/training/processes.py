"""Runs on several processes, without torchrun: forked from a process that has imported torch but not computed yet."""

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from longspan.training.processes import ALONE, Processes, connect


def on_processes(size: int, work: Callable[[Processes], object]) -> list[int]:
    """Call `work` in `size` new processes that are connected by gloo; with 0, in one that is not. The exit codes."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, size, f"file://{folder}/store", work) for rank in range(max(size, 1))]
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork(rank: int, size: int, store: str, work: Callable[[Processes], object]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        if size:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        work(connect(torch.device("cpu")) if size else ALONE)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of one process or of several, by file and name."""
    from longspan.checkpoints import store
    from longspan.checkpoints.shards import read_tensors
    from longspan.training import snapshot

    found = store.read_folder(checkpoint, snapshot.PARTS)
    files = ("model.safetensors", "training.safetensors")
    return {f"{file}/{name}": tensor for file in files for name, tensor in read_tensors(found, file).items()}
