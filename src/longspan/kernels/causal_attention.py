"""Causal attention without a position term: what is left of relative attention when r, u and w are zero."""

import torch
from torch.nn import functional as F

from longspan.kernels.relative_attention.reference import distances
from longspan.shapes import Float, Int, Tensor


def causal_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    *,
    window: int | None = None,
    first_key: Int[Tensor, "B L"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """softmax_j(q_i . k_j / sqrt(D)) v_j; query i stands at key K - L + i, the rest as in the reference."""
    L, K = query.shape[2], key.shape[2]
    if L == K and window is None and first_key is None:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    gap = distances(L, K, query.device)
    seen = gap >= 0
    if window is not None:
        seen = seen & (gap < window)
    if first_key is not None:
        seen = seen & (torch.arange(K, device=query.device) >= first_key[:, None, :, None])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)
