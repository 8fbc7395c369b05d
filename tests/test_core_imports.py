"""The core (all but the command line, serving and plots) imports with torch, numpy and safetensors alone."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import numpy, safetensors.torch, torch

WITHOUT = {"typer", "click", "rich", "tqdm", "jaxtyping", "beartype", "matplotlib", "tensorboard", "tokenizers",
           "triton", "pydantic", "fastapi", "uvicorn", "hypothesis", "transformers", "pandas", "scipy"}

for name in [name for name in sys.modules if name.partition(".")[0] in WITHOUT]:
    del sys.modules[name]
for name in WITHOUT:
    sys.modules[name] = None  # what Python takes for "there is none"

import longspan
count = 0
for module in pkgutil.walk_packages(longspan.__path__, "longspan."):
    # Triton kernels are loaded where there is a GPU, and Triton with it.
    triton = ("longspan.kernels.relative_attention.fused", "longspan.kernels.one_token.kernels")
    if not module.name.startswith(("longspan.cli", "longspan.serving", *triton)):
        importlib.import_module(module.name)
        count += 1
longspan.load
assert all(sys.modules[name] is None for name in WITHOUT)
print(count)
"""


def test_the_core_imports_bare() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
