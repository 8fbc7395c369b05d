"""Attention under a sparse pattern: the reference, its fast implementations, and the function that chooses one."""

from collections.abc import Callable
from typing import Any

import torch

from longspan.kernels.block_attention import gathered, reference
from longspan.kernels.block_attention.gathered import oldest_seen
from longspan.kernels.block_attention.pattern import Chunks, Columns, Graph, Part, Pattern, Rows, Window
from longspan.kernels.block_attention.reference import Distances
from longspan.kernels.forms import ForcedForm
from longspan.kernels.triton_works import TRITON_WORKS
from longspan.kernels.untraced import untraced
from longspan.shapes import Float, Int, Tensor

__all__ = ["Chunks", "Columns", "Distances", "Graph", "Part", "Pattern", "Rows", "Window", "block_attention", "forced"]
__all__ += ["oldest_seen"]

FLEX_FROM = 128
"""FlexAttention is faster for more queries than this."""


def _flex(*inputs: Any, **options: Any) -> Tensor:
    from longspan.kernels.block_attention import flex  # imports torch's compiler, which takes seconds

    return flex.block_attention(*inputs, **options)


FORMS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.block_attention,
    "gathered": gathered.block_attention,
    "flex": _flex,
}
_form = ForcedForm("block attention", FORMS)
forced = _form.forced


def block_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    pattern: Pattern,
    *,
    first_key: Int[Tensor, "B L"] | None = None,
    position: Distances | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """The function of `reference.block_attention`, in the fastest implementation for this device."""
    # Plans are made on the host and cached between calls, so torch.compile must not trace this.
    form = untraced(FORMS[_form.name or _fastest(query, dropout)])
    return form(query, key, value, pattern, first_key=first_key, position=position, dropout=dropout)


def _fastest(query: Float[Tensor, "B H L D"], dropout: float) -> str:
    """FlexAttention for more than a block of queries and the head widths it supports; it has no attention dropout."""
    fits = query.dtype in (torch.float16, torch.bfloat16, torch.float32) and query.shape[3] >= 16
    worth = query.is_cuda and query.shape[2] > FLEX_FROM and dropout == 0.0
    return "flex" if worth and fits and TRITON_WORKS else "gathered"
