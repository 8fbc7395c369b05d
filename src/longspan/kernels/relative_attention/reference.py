"""The definition of relative attention (Dai et al. 2019, section 3.3), written for clarity."""

import torch

from longspan.shapes import Float, Int, Tensor


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
    """softmax_j((q_i + u) . k_j + (q_i + w) . r_{i-j}) v_j, scores divided by sqrt(D).

    Query i is key K - L + i and sees no later key. `distance[:, c]` is r at distance C-1-c, so columns descend to
    distance 0. Distances beyond C-1 use the first column, which implements a clamp. With `window`, only distances
    0..window-1 are visible. `first_key[b, i]` is the oldest key visible to query i of row b (the first valid cached
    position or the start of the document). A query always sees its own position. With `discount`, scores of distances
    d beyond C-1 are lowered by discount * log(d / (C-1)).
    """
    weights = attention_weights(query, key, distance, u, w, window=window, first_key=first_key, discount=discount)
    return torch.nn.functional.dropout(weights, dropout) @ value


def attention_weights(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    *,
    window: int | None = None,
    first_key: Int[Tensor, "B L"] | None = None,
    discount: float = 0.0,
) -> Float[Tensor, "B H L K"]:
    """The softmax over the visible keys of every query."""
    scores = relative_scores(query, key, distance, u, w) / query.shape[-1] ** 0.5
    L, K = scores.shape[-2:]
    gap = distances(L, K, scores.device)
    if discount:
        scores = scores - far_discount(gap, distance.shape[1] - 1, discount).to(scores.dtype)
    masked = gap < 0
    if window is not None:
        masked = masked | (gap >= window)
    if first_key is not None:
        masked = masked | (torch.arange(K, device=scores.device) < first_key[:, None, :, None])
    return torch.softmax(scores.masked_fill(masked, float("-inf")), dim=-1)


def relative_scores(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
) -> Float[Tensor, "B H L K"]:
    """The four terms before scaling: (a) content and (c) global content, (b) position and (d) global position."""
    L, K, C = query.shape[2], key.shape[2], distance.shape[1]
    content = (query + u[:, None]) @ key.transpose(-1, -2)
    column = C - 1 - distances(L, K, query.device).clamp(0, C - 1)
    position = ((query + w[:, None]) @ distance.transpose(-1, -2)).gather(-1, column.expand(*content.shape))
    return content + position


def far_discount(gap: Int[Tensor, "*S"], longest: int, discount: float) -> Float[Tensor, "*S"]:
    """What far keys lose: thousands of keys that all look `longest` away would draw attention from the near ones."""
    longest = max(longest, 1)  # a single key is at distance 0
    return discount * (gap.clamp(min=longest).double() / longest).log()


def distances(L: int, K: int, device: torch.device) -> Int[Tensor, "L K"]:
    """The distance from query i back to key j; negative for later keys."""
    return torch.arange(K - L, K, device=device)[:, None] - torch.arange(K, device=device)
