"""Resolve the names of a device and a precision on this machine."""

import torch

from longspan.errors import DeviceError, UnknownNameError, counted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def find_device(name: str | torch.device) -> torch.device:
    """The device for `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`."""
    name = str(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (index.isascii() and index.isdigit() and len(index) < 4)):
        known = ["auto", "cpu", "cuda", "cuda:0"]
        raise UnknownNameError("device", name, known, meant="cuda" if kind == "gpu" else None)
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise DeviceError(
            f"there is no device {name!r}; this machine has {counted(count, 'CUDA device')}, so use 'cpu'"
        )
    return torch.device("cuda", int(index or 0))


def find_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a name; `auto` is float32 on a CPU and bfloat16 on CUDA. bfloat16 on a CPU is an error."""
    name = str(name).removeprefix("torch.")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, ["auto", *DTYPES])
    if device.type == "cpu" and name == "bfloat16":
        raise DeviceError(
            "bfloat16 is hundreds of times slower on a CPU than float32; use float32, or the device 'cuda'"
        )
    return DTYPES[name]
