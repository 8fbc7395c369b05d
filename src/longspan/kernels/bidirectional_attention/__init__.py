"""Relative attention in both directions: the reference, its fast form, and the function that chooses one.

Queries may be at any positions, see any keys, and have a third term for segments: XLNet.
"""

from longspan.kernels.bidirectional_attention import biased, reference
from longspan.kernels.bidirectional_attention.reference import View
from longspan.kernels.forms import ForcedForm
from longspan.shapes import Float, Tensor

__all__ = ["View", "bidirectional_attention", "forced"]

FORMS = ("reference", "biased")
_form = ForcedForm("bidirectional attention", FORMS)
forced = _form.forced


def bidirectional_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    s: Float[Tensor, "H D"],
    segments: Float[Tensor, "2 H D"],
    view: View,
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """The function of `reference.bidirectional_attention` in the fastest form: on a CPU the reference, which is also
    the only one with dropout."""
    given = (query, key, value, distance, u, w, s, segments, view)
    form = _form.name or ("biased" if query.is_cuda else "reference")
    if form == "biased" and not dropout:
        return biased.bidirectional_attention(*given)
    return reference.bidirectional_attention(*given, dropout=dropout)
