"""Relative attention with a soft mask on the distance (Sukhbaatar et al. 2019)."""

from longspan.kernels.relative_attention import skewed
from longspan.shapes import Float, Int, Tensor


def span_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    log_mask: Float[Tensor, "H C"],
    *,
    first_key: Int[Tensor, "B L"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """sum_j a_ij v_j with a_ij = m(i-j) exp(s_ij) / sum_q m(i-q) exp(s_iq) and the scores s of relative attention.

    Columns of `log_mask` are log m of the distances C-1, ..., 0, like those of `distance`; beyond C-1 m is 0. Weights
    are multiplied by m by adding log m to the scores, so the mask is one number per head and column of the position
    scores. C is the window, so the cost of a long segment follows from the span.
    """
    return skewed.relative_attention(
        query,
        key,
        value,
        distance,
        u,
        w,
        window=log_mask.shape[1],
        first_key=first_key,
        dropout=dropout,
        added=log_mask,
    )
