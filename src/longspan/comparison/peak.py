"""How much memory a stretch of work took at most."""

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
    """`bytes` is known once the work is over; None where the machine cannot tell it from what went before."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """On CUDA what tensors held; elsewhere the resident memory of this process, Python and torch in it."""
    peak = Peak()
    give_back(device)
    known = _begin(device)
    try:
        yield peak
    finally:
        peak.bytes = _end(device) if known else None


def give_back(device: torch.device) -> None:
    """What earlier work has left behind goes back to the machine, or the next would be charged for it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def _begin(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _RESET.write_text("5", encoding="ascii")  # Linux: the high-water mark falls to what is held now
    except OSError:
        return False
    return True


def _end(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
