"""Attention under a pattern on torch's own operations, for any device: only visited blocks are ever scored.

Each part of the pattern is a batch of small dense products, a query block against the key blocks it visits; parts are
put together by the weights of their sums. Time and space grow with what is visited: with L for a window.
"""

import torch
from torch.nn import functional as F

from longspan.kernels.block_attention.pattern import Pattern
from longspan.kernels.block_attention.plan import Plan, plans, take
from longspan.kernels.block_attention.reference import Distances
from longspan.shapes import Bool, Float, Int, Tensor

_LEAST = -1e30
"""Stands for minus infinity where differences are taken."""


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
    """As `reference.block_attention` defines it."""
    H, L, K = *query.shape[1:3], key.shape[2]
    read = []
    for index, plan in enumerate(plans(pattern, H, L, K, query.device, first_key)):
        seen = visible(pattern, index, plan, first_key)
        out, lse = _part(query, key, value, plan, seen, position, dropout)
        read.append(in_order(plan, out, lse))
    return together(read)


def _part(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    plan: Plan,
    seen: Bool[Tensor, "R G Q P NS"],
    position: Distances | None,
    dropout: float,
) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S"]]:
    """What the slots of one part read, and the logarithm of the sum of their weights."""
    scale, keys = query.shape[-1] ** -0.5, plan.visited(key).transpose(-1, -2)
    if position is None:
        scores = (plan.queries.take(query) * scale).unflatten(2, (-1, plan.P)) @ keys
    else:
        r, u, w = (t.to(query.dtype) for t in (position.r, position.u, position.w))
        content, turned = (
            (plan.queries.take(query + bias[:, None]) * scale).unflatten(2, (-1, plan.P)) for bias in (u, w)
        )
        terms = _position_scores(turned, r, position, plan)
        scores = torch.baddbmm(terms.flatten(0, 2), content.flatten(0, 2), keys.flatten(0, 2)).view_as(terms)
    scores = (scores if scores.dtype == torch.float64 else scores.float()).masked_fill_(~seen, float("-inf"))
    peak = scores.detach().amax(-1, keepdim=True).clamp(min=_LEAST)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True).clamp(min=1.0)  # the largest weight is 1 wherever anything is seen
    read = (F.dropout(weights, dropout) / total).to(value.dtype) @ plan.visited(value)
    return read.flatten(2, 3), (peak + total.log()).flatten(2)


def _position_scores(
    query: Float[Tensor, "B H Q P D"], r: Float[Tensor, "H C D"], position: Distances, plan: Plan
) -> Float[Tensor, "B H Q P NS"]:
    """q . r at the distance of every query of a block and every key it visits."""
    P, keys = plan.P, plan.visits.shape[-1] * plan.S
    if plan.behind is None:
        gap = plan.query_places() - plan.key_places()
        terms = query @ r.transpose(1, 2)[:, None]
        return terms.gather(-1, position.column(gap).expand(*query.shape[:4], keys))
    # Visited blocks in a row: key j of query i is behind*P + i - j steps away, so that the row of query i is the row of
    # the distances slid by i, and the slid matrix is a view (kernels/relative_attention/skewed.py).
    gap = torch.arange(plan.behind * P + P - 1, plan.behind * P - keys, -1, device=query.device)
    known = r[:, position.column(gap * plan.step)]
    terms = (query @ known.transpose(1, 2)[:, None]).contiguous()
    width = P + keys - 1
    sizes, strides = terms.shape[:3], terms.stride()[:3]
    return terms.as_strided((*sizes, P, keys), (*strides, width - 1, 1), terms.storage_offset() + P - 1)


def visible(
    pattern: Pattern, index: int, plan: Plan, first_key: Int[Tensor, "B L"] | None
) -> Bool[Tensor, "R G Q P NS"]:
    """Which of the visited keys a query sees through this part; kept, since many layers ask."""
    name = "seen" if first_key is None else "seen in documents"
    asked, seen = plan.made.get(name, (None, None))
    if seen is None or asked is not first_key:
        with torch.inference_mode(False):
            seen = _visible(pattern, index, plan, first_key)
        plan.made[name] = first_key, seen
    return seen


def _visible(
    pattern: Pattern, index: int, plan: Plan, first_key: Int[Tensor, "B L"] | None
) -> Bool[Tensor, "R G Q P NS"]:
    query, key = plan.query_places(), plan.key_places()
    head = torch.arange(key.shape[1], device=key.device)[:, None, None, None]
    there = (query >= 0) & (key >= 0)
    if first_key is None:
        return pattern.seen_first_by(index, head, query, key) & there
    first = _at(first_key, query - plan.offset)
    shown = pattern.seen_first_by(index, head, query - first, key - first) & there & (key >= first)
    return shown if pattern.causal else shown & (query >= _at(first_key, key))


def _at(first_key: Int[Tensor, "B L"], places: Int[Tensor, "R G Q X Y"]) -> Int[Tensor, "B G Q X Y"]:
    B, found = first_key.shape[0], places.clamp(min=0)
    return first_key.gather(1, found.expand(B, *found.shape[1:]).flatten(1)).view(B, *found.shape[1:])


def in_order(
    plan: Plan, out: Float[Tensor, "B H S D"], lse: Float[Tensor, "B H S"]
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """Slots back in the order of the queries; a query that the part leaves out has read nothing."""
    if plan.queries.run is not None:
        begin, L = plan.queries.run[0], plan.back.shape[1]
        return out.narrow(2, begin, L), lse.narrow(2, begin, L)
    slots, nothing = plan.back.clamp(min=0)[:, None], plan.back[:, None] < 0
    lse = take(lse[..., None], slots)[..., 0].masked_fill(nothing, _LEAST)
    return take(out, slots).masked_fill(nothing[..., None], 0.0), lse


def together(read: list[tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]]) -> Float[Tensor, "B H L D"]:
    """One softmax over all parts, from each part's own."""
    if len(read) == 1:
        return read[0][0]
    sums = torch.stack([lse for _, lse in read]).clamp(min=_LEAST)
    weights = torch.softmax(sums, dim=0)[..., None]
    return sum((weight.to(out.dtype) * out for weight, (out, _) in zip(weights, read, strict=True)), read[0][0] * 0)


def oldest_seen(pattern: Pattern, heads: int, oldest: Int[Tensor, "L"]) -> Int[Tensor, "L"]:
    """The least of `oldest` among the keys each query sees: one hop of how far back a model can look."""
    L, found = oldest.shape[0], oldest
    for index, plan in enumerate(plans(pattern, heads, L, L, oldest.device)):
        key, seen = plan.key_places(), visible(pattern, index, plan, None)
        least = torch.where(seen, oldest[key.clamp(min=0)], L).amin((1, 4)).flatten()
        slots = plan.back[0]
        found = torch.where(slots >= 0, torch.minimum(found, least[slots.clamp(min=0)]), found)
    return found
