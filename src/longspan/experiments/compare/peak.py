"""Peak memory of a block of code."""

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass
class Peak:
    """`bytes` is set at the end of the block; None if the system cannot reset its high-water mark."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """On CUDA the memory of tensors; elsewhere the resident memory of the process, Python and torch included."""
    peak = Peak()
    release_memory(device)
    measured = _begin(device)
    try:
        yield peak
    finally:
        peak.bytes = _end(device) if measured else None


def release_memory(device: torch.device) -> None:
    """Return unused memory to the system, so that it does not count towards the next block."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _begin(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _RESET.write_text("5", encoding="ascii")  # Linux: resets the high-water mark to the current size
    except OSError:
        return False
    return True


def _end(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
