"""Computes the fixtures again with `transformers` and compares them with the committed ones.

`make parity` runs it in a separate environment: python tests/parity/compare.py
"""

import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from make_fixtures import FIXTURES, make
from safetensors.torch import load_file

TOLERANCE = 1e-6  # absolute and relative: machines may sum in another order


def read(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".pkl":  # made here, so it is safe to unpickle; its objects cannot be compared
        values = pickle.loads(path.read_bytes())
        return {key: values[key] for key in ("idx2sym", "sym2idx", "lower_case", "delimiter", "unk_idx")}
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def differences(committed: Path, made: Path) -> list[str]:
    names = sorted({path.relative_to(root) for root in (committed, made) for path in root.rglob("*.*")})
    found = []
    for name in names:
        if not ((committed / name).is_file() and (made / name).is_file()):
            found.append(f"{name}: only {'committed' if (committed / name).is_file() else 'recomputed'}")
            continue
        old, new = read(committed / name), read(made / name)
        for key in sorted(old.keys() | new.keys()):
            if key not in old or key not in new:
                found.append(f"{name}: {key} only {'committed' if key in old else 'recomputed'}")
            elif not same(old[key], new[key]):
                found.append(f"{name}: {key} differs")
    return found


def same(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor):
        return old == new
    alike = old.shape == new.shape and old.dtype == new.dtype
    return alike and torch.allclose(old, new, rtol=TOLERANCE, atol=TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        found = differences(FIXTURES, Path(folder))
    if found:
        sys.exit("\n".join(["transformers no longer gives the values of the fixtures:", *found]))
    print(f"parity fixtures: {len(list(FIXTURES.iterdir()))} recomputed, all equal")
