"""Relative attention: the reference, its fast implementations, and the function that chooses one."""

from collections.abc import Callable
from typing import Any

import torch

from longspan.kernels.forms import ForcedForm
from longspan.kernels.observe import AttentionCall, notify, observers
from longspan.kernels.relative_attention import fused, reference, skewed
from longspan.kernels.triton_works import TRITON_WORKS
from longspan.shapes import Float, Int, Tensor

FORMS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.relative_attention,
    "skewed": skewed.relative_attention,
    "fused": fused.relative_attention,
}
_form = ForcedForm("relative attention", FORMS)
forced = _form.forced


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
    discount: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """The function of `reference.relative_attention`, in the fastest implementation for this device."""
    if observers:
        notify(AttentionCall(query, key, distance, u, w, window, first_key, discount))
    form = _form.name or _fastest(query)
    if min(key.shape[2], window or key.shape[2]) <= distance.shape[1]:
        discount = 0.0  # no visible key is beyond the table
    options: Any = {"window": window, "first_key": first_key, "dropout": dropout, "discount": discount}
    return FORMS[form](query, key, value, distance, u, w, **options)


def _fastest(query: Float[Tensor, "B H L D"]) -> str:
    """Fused where Triton can compile it. A single query needs no shift, and torch's attention is faster for it."""
    fits = query.dtype in (torch.bfloat16, torch.float32) and query.shape[2] > 1 and 32 <= query.shape[3] <= 128
    return "fused" if query.is_cuda and fits and TRITON_WORKS else "skewed"
