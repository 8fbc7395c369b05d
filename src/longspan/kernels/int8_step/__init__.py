"""One decoding step with int8 weights and an int8 cache, in C.

`step.c` is compiled on first use, with the machine's own vector instructions, and kept in the user's cache folder.
Without a C compiler the caller decodes in float32.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from torch.nn import functional as F

from longspan.shapes import Float, Int, Tensor

COLUMNS, HEAD_COLUMNS = 64, 16
"""Columns of matrices and of heads are padded to multiples of these."""
ACTIVATIONS = {None: 0, "relu": 1, "squared-relu": 2, "gelu": 3}
SOURCE = Path(__file__).with_name("step.c")
OPTIONS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
WAIT = 120
"""Seconds for the compiler."""


class Matrix(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
    )


class Norm(Structure):
    _fields_ = (("gain", c_void_p), ("shift", c_void_p), ("eps", c_double))


class Layer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "up", "down")),
        *((name, Norm) for name in ("attention_norm", "feed_forward_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("distance", "distance_scale", "u", "w")),
        *((name, c_void_p) for name in ("keys", "values", "key_scale", "value_scale", "taps", "inputs")),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, Matrix) for name in ("embedding", "head")),
        ("final_norm", Norm),
        *(
            (name, c_int64)
            for name in (
                *("count", "width", "heads", "head_width"),
                *("slots", "distances", "pre_norm", "activation", "taps"),
            )
        ),
        *((name, c_double) for name in ("embedding_scale", "temperature")),
        *((name, c_void_p) for name in ("discounts", "x", "y", "sum", "qkv", "attended", "inner", "scores")),
    )


def step(model: Model, token: int, written: int, logits: Float[Tensor, "V"]) -> None:
    """Logits after a token, which is number `written` of its stream. Keys and values are stored in their slot."""
    library = compiled()
    assert library is not None
    library.longspan_step(ctypes.byref(model), token, written, logits.data_ptr())


def matrix(weight: Int[Tensor, "R C"], scale: Float[Tensor, "R"], bias: Float[Tensor, "R"] | None = None) -> Matrix:
    return Matrix(weight.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr(), *weight.shape)


def padded(tensor: Tensor, multiple: int) -> Tensor:
    """Zeros after the last axis, up to a multiple."""
    return F.pad(tensor, (0, -tensor.shape[-1] % multiple))


@cache
def compiled() -> Any:
    """The library, or None if this machine has no compiler that makes one."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    # Wider vectors than GCC takes by default on x86: a step only reads weights, so clocks matter less.
    wide = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
    plain = tuple(option for option in OPTIONS if option != "-march=native")
    for options in ((*OPTIONS, *wide, "-fopenmp"), (*OPTIONS, "-fopenmp-simd"), plain):
        try:
            library = ctypes.CDLL(str(_build(compiler, options)))
        except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home folder
            continue
        library.longspan_step.argtypes = [POINTER(Model), c_int64, c_int64, c_void_p]
        library.longspan_step.restype = None
        return library
    return None


def _build(compiler: str, options: tuple[str, ...]) -> Path:
    """The compiled file. Its name has everything it depends on, so it is made once per machine type and version."""
    facts = "\n".join((SOURCE.read_text(encoding="utf-8"), compiler, *options, platform.machine(), _processor()))
    folder = Path(os.environ.get("LONGSPAN_CACHE") or Path.home() / ".cache" / "longspan")
    made = folder / f"int8-step-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        target = Path(temporary) / "step.so"
        command = [compiler, *options, str(SOURCE), "-o", str(target), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT)
        target.replace(made)  # another process may have made it meanwhile: both are equal
    return made


def _processor() -> str:
    """The vector instructions of this processor, which -march=native uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
