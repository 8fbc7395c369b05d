"""The processes of a run: which rows each of them trains, and what they tell each other.

`torchrun` starts the processes. They hold the same data position and the same random state, so that neither depends on
their number. Other runs use `ALONE`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from longspan.errors import ConfigError, LongspanError, TrainingError
from longspan.shapes import Float, Tensor
from longspan.training.launch import PREFIX, agree_on_round, is_first_to_report, launched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class LostProcessError(TrainingError):
    """Another process of the run has ended or does not answer."""

    def __init__(self) -> None:
        super().__init__(
            "another process of this run has ended or does not answer; its own message says why, and --resume auto "
            "continues from the last checkpoint"
        )


class OtherProcessError(LongspanError):
    """An error that another process reports, so this one is silent."""


@dataclass(frozen=True)
class Processes:
    """In a run of one process nothing is sent: it has all rows, and what it shares or exchanges is its own."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    mesh: "DeviceMesh | None" = None
    """Set if `torchrun` started this process, even a single one."""
    counting: Any = None
    """The process group for counts in the loss. A group has one order of calls, and gradients use the default group."""
    saving: Any = None
    """The process group for checkpoints, which are written by a thread."""
    launch: Any = None
    """The store of torchrun, which outlives a restart."""

    @property
    def distributed(self) -> bool:
        return self.mesh is not None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def check_batch(self, rows: int, parts: int) -> None:
        if rows % (self.size * parts):
            raise ConfigError(
                f"training.batch={rows} is not divisible by {self.size} processes times training.accumulate={parts}; "
                f"use a multiple of {self.size * parts}, or another number of processes"
            )

    def rows(self, batch: int, parts: int) -> NDArray[np.int64] | None:
        """The rows of this process, or None for all. Part k of all processes together is part k of a single one."""
        if self.size == 1:
            return None
        return np.arange(batch).reshape(parts, self.size, -1)[:, self.rank].ravel()

    def part_of(self, rows: int) -> slice:
        """The rows of this process in a part of the batch."""
        own = rows // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def as_rows(self, own: Tensor) -> Tensor:
        """A tensor of this process's rows as its part of the tensor of all rows."""
        if self.mesh is None:
            return own
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(own.detach(), self.mesh, [Shard(0)], run_check=False)

    def seed_device(self, seed: int, step: int) -> None:
        """On a GPU every process draws its own masks, seeded by the seed, the step and its number."""
        torch.cuda.manual_seed(int(np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)[0]))

    def share_random_state(self) -> None:
        """Use the random state of the first process. Attention that is laid out by documents draws masks of other sizes
        in other processes."""
        if self.distributed:
            state = torch.get_rng_state()
            dist.broadcast(state, src=0)
            torch.set_rng_state(state)

    def mean(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        if self.distributed:
            value = value / self.size
            dist.all_reduce(value)
        return value

    def exchange(self, values: Sequence[float]) -> NDArray[np.float64]:
        """The values of every process, [processes, values]. Uses the CPU, so no device waits."""
        own = torch.tensor([values], dtype=torch.float64)
        if not self.distributed:
            return own.numpy()
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return torch.cat(found).numpy()

    def share(self, value: T) -> T:
        """The value of the first process."""
        if not self.distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def first(self, work: Callable[[], T]) -> T | None:
        """Let the first process do some work while the others wait; None in the others. Its error ends all of them."""
        found, problem = None, ""
        if self.is_first:
            try:
                found = work()
            except LongspanError as error:
                if not self.distributed:
                    raise
                self.share(str(error))
                raise
        problem = self.share(problem)
        if problem:
            raise OtherProcessError(problem)
        return found

    def in_turn(self, work: Callable[[], T]) -> T:
        """Let the first process of every machine do some work before the others do it, for work that fills a cache."""
        if not self.distributed:
            return work()
        found = [work()] if self.local_rank == 0 else []
        dist.barrier(self.saving)
        return found[0] if found else work()


ALONE = Processes()


def own_device(device: torch.device) -> torch.device:
    """The device of this process: on a machine with several GPUs, the one with its number."""
    if device.type == "cuda" and launched():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return device


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """The processes that `torchrun` started, connected with each other; or `ALONE`. A caller that has connected them
    itself also disconnects them."""
    if dist.is_initialized():
        yield connect(device)
        return
    if not launched():
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _lost_processes():
        store, rank, size = next(dist.rendezvous("env://"))
        launch = dist.PrefixStore(PREFIX, store)
        # In the keys of an earlier round gloo would find the addresses of the ended processes.
        store = dist.PrefixStore(f"round/{agree_on_round(launch, rank, size)}", launch)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        yield replace(connect(device), launch=launch)
        # Not after an error: it is printed first, and the others see that this process has ended.
        dist.destroy_process_group()


def connect(device: torch.device) -> Processes:
    """The processes of torch's default process group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    groups = [dist.new_group(), dist.new_group(backend="gloo")]
    return Processes(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), mesh, *groups)


@contextmanager
def _lost_processes() -> Iterator[None]:
    """Turns the error of a collective call into ours."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise LostProcessError from None


def is_lost(error: BaseException) -> bool:
    """Whether this is the error of a collective call, which means that another process has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def reports_error(error: LongspanError) -> bool:
    """Whether this process prints an error. All processes may have the same one, and the first to ask prints it."""
    if isinstance(error, OtherProcessError):
        return False
    if not launched():
        return True
    first = is_first_to_report()
    if first is None:  # the node with the store has ended
        return not isinstance(error, LostProcessError) or os.environ["LOCAL_RANK"] == "0"
    return first
