"""Causal attention without position terms: relative attention with r, u and w at zero."""

from typing import Any

import torch
from torch.nn import functional as F

from longspan.kernels.observe import AttentionCall, notify, observers
from longspan.kernels.relative_attention.reference import distances
from longspan.shapes import Bool, Float, Int, Tensor

BLOCK = 128
_compiled: list[Any] = []


def causal_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    *,
    window: int | None = None,
    first_key: Int[Tensor, "B L"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """softmax_j(q_i . k_j / sqrt(D)) v_j. Query i is key K - L + i; `window` and `first_key` are as in the
    reference."""
    if observers:
        notify(AttentionCall(query, key, None, None, None, window, first_key))
    L, K = query.shape[2], key.shape[2]
    if L == K and window is None and first_key is None:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    if query.is_cuda and L > 1 and dropout == 0.0 and query.shape[3] >= 16:
        return _flex(query, key, value, block_mask(query, K, window, first_key))
    gap = distances(L, K, query.device)
    seen = gap >= 0
    if window is not None:
        seen = seen & (gap < window)
    if first_key is not None:
        seen = seen & (torch.arange(K, device=query.device) >= first_key[:, None, :, None])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)


def _flex(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
    """Compiled FlexAttention, which keeps only the scores of a tile. Imported here because it loads the compiler, which
    takes seconds."""
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, block_mask=block_mask)
    if not _compiled:
        _compiled.append(torch.compile(flex_attention))
    return _compiled[0](query, key, value, block_mask=block_mask)


def block_mask(
    query: Float[Tensor, "B H L D"], keys: int, window: int | None, first_key: Int[Tensor, "B L"] | None
) -> Any:
    """The blocks of keys that each block of queries visits, computed from positions without an [L, K] mask."""
    from torch.nn.attention.flex_attention import BlockMask

    L, device = query.shape[2], query.device
    M = keys - L
    some, full = _blocks(L, keys, window, first_key, device)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001 (the signature that FlexAttention needs)
        visible = j <= i + M
        if window is not None:
            visible = visible & (i + M - j < window)
        if first_key is not None:
            visible = visible & (j >= first_key[b, i])
        return visible

    return BlockMask.from_kv_blocks(
        *_in_order(some & ~full), *_in_order(full), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(L, keys)
    )


def _blocks(
    L: int, K: int, window: int | None, first_key: Int[Tensor, "B L"] | None, device: torch.device
) -> tuple[Bool[Tensor, "R 1 I J"], Bool[Tensor, "R 1 I J"]]:
    """Pairs of blocks in which some query sees some key, and those in which every query sees every key."""
    i0 = torch.arange(0, L, BLOCK, device=device)[:, None] + K - L  # first and last query of a block, as key positions
    i1 = (i0 + BLOCK - 1).clamp(max=K - 1)
    j0 = torch.arange(0, K, BLOCK, device=device)
    j1 = j0 + BLOCK - 1
    some, full = j0 <= i1, (j1 <= i0) & (j1 < K)
    if window is not None:
        some, full = some & (i0 - j1 < window), full & (i1 - j0 < window)
    some, full = some[None, None], full[None, None]
    if first_key is not None:
        # It never decreases along a row, so the first query of a block sees the most keys and the last one the fewest.
        ends = (torch.arange(0, L, BLOCK, device=device) + BLOCK - 1).clamp(max=L - 1)
        oldest, newest = first_key[:, ::BLOCK, None], first_key[:, ends, None]
        some, full = some & (j1 >= oldest)[:, None], full & (j0 >= newest)[:, None]
    return some, full


def _in_order(chosen: Bool[Tensor, "R 1 I J"]) -> tuple[Int[Tensor, "R 1 I"], Int[Tensor, "R 1 I J"]]:
    """The number of key blocks that each query block visits, and all key blocks with the visited ones first."""
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)
