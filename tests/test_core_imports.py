"""The core (without command line, serving and plots) imports with only torch, numpy and safetensors."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys, warnings
import numpy, safetensors.torch, torch

WITHOUT = {"typer", "click", "rich", "tqdm", "jaxtyping", "beartype", "matplotlib", "tensorboard", "tokenizers",
           "triton", "pydantic", "fastapi", "uvicorn", "hypothesis", "transformers", "pandas", "scipy"}

for name in [name for name in sys.modules if name.partition(".")[0] in WITHOUT]:
    del sys.modules[name]
for name in WITHOUT:
    sys.modules[name] = None  # makes Python raise ImportError

import longspan
filters, count = list(warnings.filters), 0
for module in pkgutil.walk_packages(longspan.__path__, "longspan."):
    # Triton kernels are imported only on machines with a GPU.
    triton = [f"longspan.kernels.relative_attention.{name}" for name in ("fused", "slide_", "stored_")]
    if module.name.startswith("longspan.kernels.") and module.name.endswith(("kernels", "kernel")):
        continue
    extras = ("longspan.hf", "longspan.interop.hf", "longspan.interop.lm_eval")
    if not module.name.startswith(("longspan.cli", "longspan.__main__", "longspan.serving", *triton, *extras)):
        importlib.import_module(module.name)
        count += 1
longspan.load
ours = [one for one in warnings.filters if one not in filters and not one[2].__module__.startswith("sympy")]
assert not ours, ours
assert all(sys.modules[name] is None for name in WITHOUT)
print(count)
"""


def test_the_core_needs_no_optional_package() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
