"""Checkpoints of several processes, with torch.distributed.checkpoint: each writes a shard, in a thread.

The shards are safetensors files (`checkpoints/shards.py`). DCP's own format has a pickle, which longspan never reads.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageWriter, async_save
from torch.distributed.checkpoint.api import CheckpointException

from longspan.checkpoints import store
from longspan.errors import CheckpointError
from longspan.shapes import Tensor
from longspan.training.processes import LostProcessError, Processes, is_lost


class PendingSave:
    """A checkpoint that a thread of every process writes. `wait` returns when it is committed."""

    def __init__(self, future: "Future[Any]", path: Path, folder: ExitStack) -> None:
        self.future, self.path, self.folder = future, path, folder

    def wait(self) -> None:
        try:
            with self.folder:  # after an error, the temporary folder is removed
                self.future.result()
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if isinstance(first, CheckpointError):
                raise first from None
            if is_lost(first):
                raise LostProcessError from None
            raise CheckpointError(f"{self.path} could not be saved: {first!s:.200}; fix that and try again") from None


class _Writer(HuggingFaceStorageWriter):
    """DCP calls `finish` on the first process when all shards are written."""

    def __init__(self, folder: Path, commit: Callable[[], None]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.commit = commit

    def finish(self, metadata: Any, results: Any) -> None:  # noqa: ARG002
        self.commit()


def save_shards(
    path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, bytes], processes: Processes
) -> PendingSave:
    """Start to write a checkpoint. `tensors` are copies on the CPU, DTensors where a process has a part of a tensor.

    The first process writes the other `files` and the manifest, and renames the folder: until then the checkpoint does
    not exist.
    """
    stack = ExitStack()
    folder = processes.first(lambda: stack.enter_context(store.new_folder(path, replace=True)))
    temporary: Any = processes.share(None if folder is None else folder.path)

    def commit() -> None:
        assert folder is not None
        with stack.pop_all():
            for shard in sorted(each.name for each in folder.path.iterdir()):
                folder.adopt(shard)
            for name, content in files.items():
                folder.write(name, content)

    future: Any = async_save(dict(tensors), storage_writer=_Writer(temporary, commit), process_group=processes.saving)
    return PendingSave(future, path, stack)
