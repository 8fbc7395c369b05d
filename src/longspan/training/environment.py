"""The environment of a run: enough to explain why the results of two runs differ."""

import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch

from longspan import __version__

COMMAND = "LONGSPAN_COMMAND"


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, commit and hardware as plain values."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command(),
        "longspan": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda,
    }


def command() -> list[str]:
    """The command of this process, or the one in LONGSPAN_COMMAND: that of a process which starts several runs."""
    return shlex.split(os.environ.get(COMMAND, "")) or ["longspan", *sys.argv[1:]]


def hardware(device: torch.device) -> str:
    """The name of the GPU or the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def peak_memory(device: torch.device) -> int:
    """The most memory that this process has used, in bytes: on the GPU, or on a CPU in total."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def commit() -> str | None:
    """The commit of the source tree, followed by `+` if files differ from it; None for an installed package."""
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(folder)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()  # cpuinfo on ARM has no model name
