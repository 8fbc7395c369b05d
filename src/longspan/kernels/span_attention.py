"""Relative attention through a soft mask of distance (Sukhbaatar et al. 2019)."""

import torch
from torch.nn import functional as F

from longspan.kernels.relative_attention import skewed
from longspan.shapes import Float, Int, Tensor

LEAST_BLOCK = 64
"""Queries that are read together where a span is short; fewer would leave products too small to be fast."""


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
    """a_ij = m(i-j) exp(s_ij) / sum_q m(i-q) exp(s_iq), with the scores s of relative attention; reads sum_j a_ij v_j.

    Columns of `log_mask` are log m of the distances C-1, ..., 0, as those of `distance`; beyond C-1 m is 0. To multiply
    by m before the sum is to add log m to the score, so the mask is one number per head and column of the position
    scores, and slides with them. Where C is short, every block of queries is handed only the keys it can see, and the
    cost is L (C + block) instead of L K.
    """
    B, _, L, _ = query.shape
    C = log_mask.shape[1]
    block = max(C, LEAST_BLOCK)
    cut = block < L and block + C <= key.shape[2]
    if cut:
        query, key, value, first_key = _blocks(query, key, value, first_key, block, C)
    read = skewed.relative_attention(
        query, key, value, distance, u, w, window=C, first_key=first_key, dropout=dropout, added=log_mask
    )
    return read.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)[:, :, :L] if cut else read


def _blocks(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    first_key: Int[Tensor, "B L"] | None,
    block: int,
    distances: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Every block of queries as a row of its own, beside the block + distances - 1 keys that it sees."""
    B, _, L, _ = query.shape
    after = -L % block  # queries that fill the last block, and are thrown away
    before = distances - 1 - (key.shape[2] - L)  # keys that the first query could see and that are not there, or spare
    query = F.pad(query, (0, 0, 0, after)).unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
    count = query.shape[0] // B

    def cut(keys: Float[Tensor, "B H K D"]) -> Float[Tensor, "N H W D"]:
        windows = F.pad(keys, (0, 0, before, after)).unfold(2, block + distances - 1, block)
        return windows.permute(0, 2, 1, 4, 3).flatten(0, 1)

    if first_key is None and before > 0:
        first_key = torch.zeros(B, L, dtype=torch.int64, device=query.device)
    if first_key is not None:
        starts = block * torch.arange(count, device=query.device)
        first_key = F.pad(first_key + before, (0, after)).view(B, count, block)
        first_key = (first_key - starts[:, None]).clamp(min=0).flatten(0, 1)
    return query, cut(key), cut(value), first_key
