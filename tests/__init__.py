"""The tests start Python over a hundred times, so bytecode is kept: it halves the time to import torch.

pytest imports this first. Where PYTHONDONTWRITEBYTECODE is set, the bytecode is in build/, not next to the code.
"""

import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / "build" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix  # for the workers and the processes of tests
