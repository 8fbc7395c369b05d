"""Relative attention: the definition and its fast forms, and the one entry that chooses."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from longspan.errors import UnknownNameError
from longspan.kernels.relative_attention import fused, reference, skewed
from longspan.shapes import Float, Int, Tensor

FORMS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.relative_attention,
    "skewed": skewed.relative_attention,
    "fused": fused.relative_attention,
}
_forced: list[str] = []


def has_compiler() -> bool:
    """Triton compiles its launchers with the machine's C compiler, the one CC names if it does: without it there is no
    Triton."""
    named = os.environ.get("CC", "").split()[:1]
    return any(shutil.which(name) for name in named or ("gcc", "clang", "cc"))


# Looked up once, since a compiled model cannot look things up.
TRITON_WORKS = importlib.util.find_spec("triton") is not None and has_compiler()


@contextmanager
def forced(form: str) -> Iterator[None]:
    """Within this block every call takes the named form: for tests, benchmarks and doubt."""
    if form not in FORMS:
        raise UnknownNameError("form of relative attention", form, FORMS)
    _forced.append(form)
    try:
        yield
    finally:
        _forced.pop()


def relative_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    *,
    window: int | None = None,
    first_key: Int[Tensor, "B L"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """As `reference.relative_attention` defines it, in the fastest form this device has."""
    form = _forced[-1] if _forced else _fastest(query)
    return FORMS[form](query, key, value, distance, u, w, window=window, first_key=first_key, dropout=dropout)


def _fastest(query: Float[Tensor, "B H L D"]) -> str:
    """Fused where Triton can build it. One query has nothing to slide; torch's own attention is at its best there."""
    fits = query.dtype in (torch.bfloat16, torch.float32) and query.shape[2] > 1 and 32 <= query.shape[3] <= 128
    return "fused" if query.is_cuda and fits and TRITON_WORKS else "skewed"
