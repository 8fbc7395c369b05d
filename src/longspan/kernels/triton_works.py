"""Whether Triton kernels can be compiled on this machine."""

import importlib.util
import os
import shutil


def has_compiler() -> bool:
    """Whether there is a C compiler: that of CC if it is set, else gcc, clang or cc. Triton needs it for its
    launchers."""
    named = os.environ.get("CC", "").split()[:1]
    return any(shutil.which(name) for name in named or ("gcc", "clang", "cc"))


# Checked once, because compiled code cannot search for files.
TRITON_WORKS = importlib.util.find_spec("triton") is not None and has_compiler()
