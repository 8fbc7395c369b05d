"""Relative attention in torch operations, for any device, without gather and without a mask tensor.

Position scores are computed once per query and distance, in one product. Key j of query i is then in column
j - i + L - 1. In a row-major buffer with row stride S, the element (i, j - i + c) is at i (S - 1) + j + c, so the same
memory with row stride S - 1 is the shifted matrix. Hidden distances (later keys, and those beyond the window) are
columns of -inf in the buffer, which gives the causal mask at no cost; see docs/transformer_xl.md.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from longspan.kernels.relative_attention.reference import far_discount
from longspan.shapes import Float, Int, Tensor

LEAST_BLOCK = 64
"""Queries per block with a short window; with fewer, matrix products are too small to be fast."""
BLOCK_QUERIES = 256
"""Queries of a long segment whose scores are computed at once."""


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
    added: Float[Tensor, "H C"] | None = None,
) -> Float[Tensor, "B H L D"]:
    """The function of `reference.relative_attention`; `added` is one more term per head and distance.

    With a short window, every block of queries gets only the keys it can see: L (window + block) scores instead of L K.
    A long segment is computed in blocks without the later keys, which halves the scores.
    """
    B, H, L, D = query.shape
    options: Any = {"dropout": dropout, "discount": discount, "added": added}
    block = max(window or L, LEAST_BLOCK)
    if window is not None and block < L and block + window <= key.shape[2]:
        query, key, value, first_key = _blocks(query, key, value, first_key, block, window)
        output = relative_attention(query, key, value, distance, u, w, window=window, first_key=first_key, **options)
        return output.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)[:, :, :L]
    if L > BLOCK_QUERIES:
        parts = [
            relative_attention(q, k, v, distance, u, w, window=window, first_key=first, **options)
            for q, k, v, first in _query_blocks(query, key, value, first_key, window)
        ]
        return torch.cat(parts, dim=2)
    scale = D**-0.5
    position = position_scores((query + w[:, None]) * scale, distance, key.shape[2], window, discount, added)
    if first_key is not None and (first_key.is_cuda or torch.compiler.is_compiling() or bool(first_key.max() > 0)):
        hidden = torch.arange(key.shape[2], device=key.device) < first_key[:, None, :, None]
        position = position.masked_fill(hidden, float("-inf"))
    if not (torch.is_grad_enabled() and position.requires_grad) and dropout == 0.0:
        if position.is_cuda:
            # The CUDA kernels use vector loads and rely on the alignment of the mask.
            position = position.contiguous()
        return F.scaled_dot_product_attention(query + u[:, None], key, value, attn_mask=position, scale=scale)
    content = (query + u[:, None]) * scale
    scores = torch.baddbmm(position.flatten(0, 1), content.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    weights = F.dropout(torch.softmax(scores, dim=-1), dropout)
    return (weights @ value.flatten(0, 1)).view(B, H, L, -1)


def _blocks(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    first_key: Int[Tensor, "B L"] | None,
    block: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Every block of queries as a row of the batch, with the block + window - 1 keys that it sees."""
    B, _, L, _ = query.shape
    after = -L % block  # padding of the last block, cut off from the output
    before = window - 1 - (key.shape[2] - L)  # keys missing for the first query if positive, unused keys if negative
    query = F.pad(query, (0, 0, 0, after)).unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
    count = query.shape[0] // B

    def seen(keys: Float[Tensor, "B H K D"]) -> Float[Tensor, "N H W D"]:
        windows = F.pad(keys, (0, 0, before, after)).unfold(2, block + window - 1, block)
        return windows.permute(0, 2, 1, 4, 3).flatten(0, 1)

    if first_key is None and before > 0:
        first_key = torch.zeros(B, L, dtype=torch.int64, device=query.device)
    if first_key is not None:
        starts = block * torch.arange(count, device=query.device)
        first_key = F.pad(first_key + before, (0, after)).view(B, count, block)
        first_key = (first_key - starts[:, None]).clamp(min=0).flatten(0, 1)
    return query, seen(key), seen(value), first_key


def _query_blocks(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    first_key: Int[Tensor, "B L"] | None,
    window: int | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Blocks of BLOCK_QUERIES queries, each with the keys from the oldest that it can see to its own."""
    L, M = query.shape[2], key.shape[2] - query.shape[2]
    for begin in range(0, L, BLOCK_QUERIES):
        end = min(begin + BLOCK_QUERIES, L)
        oldest = 0 if window is None else max(M + begin - window + 1, 0)
        keys = slice(oldest, M + end)
        first = None if first_key is None else (first_key[:, begin:end] - oldest).clamp(min=0)
        yield query[:, :, begin:end], key[:, :, keys], value[:, :, keys], first


def position_scores(
    query: Float[Tensor, "B H L D"],
    distance: Float[Tensor, "H C D"],
    keys: int,
    window: int | None = None,
    discount: float = 0.0,
    added: Float[Tensor, "H C"] | None = None,
) -> Float[Tensor, "B H L K"]:
    """query_i . r_{i-j} at [i, j] for every key, -inf where the distance is hidden; a view with row stride S - 1."""
    B, H, L, _ = query.shape
    S, seen = keys + L - 1, keys if window is None else min(keys, window)
    known = distance[:, max(distance.shape[1] - seen, 0) :]
    # One product per head over all rows: broadcasting r over the batch would copy it B times.
    rows, columns = query.transpose(0, 1).flatten(1, 2), known.transpose(1, 2)
    more = None if added is None else added[:, None, added.shape[1] - known.shape[1] :]
    parts = (keys - seen, seen - known.shape[1], known.shape[1], L - 1)  # beyond, clamped, known, future
    less: Tensor | float = 0.0
    if discount and seen > distance.shape[1]:
        far = torch.arange(seen - 1, distance.shape[1] - 1, -1, device=query.device)
        less = far_discount(far, distance.shape[1] - 1, discount).to(query.dtype)
    trainable = any(t is not None and t.requires_grad for t in (query, distance, added))
    if torch.is_grad_enabled() and trainable:
        scores = rows @ columns if more is None else rows @ columns + more
        hidden = scores.new_full((), float("-inf"))
        fill = (hidden, scores[..., :1] - less, scores, hidden)
        buffer = torch.cat([part.expand(H, B * L, n) for part, n in zip(fill, parts, strict=True)], dim=-1)
    else:
        buffer = query.new_empty(H, B * L, S)
        beyond, clamped, scores, future = buffer.split(parts, dim=-1)
        torch.bmm(rows, columns, out=scores)
        if more is not None:
            scores.add_(more)
        beyond.fill_(float("-inf"))
        clamped.copy_((scores[..., :1] - less).expand_as(clamped))
        future.fill_(float("-inf"))
    if L == 1:  # nothing to shift
        return buffer.view(H, B, L, keys).transpose(0, 1)
    return buffer.as_strided((B, H, L, keys), (L * S, B * L * S, S - 1, 1), L - 1)
