"""Attention under a pattern in torch operations, for any device. Only visited blocks are computed.

Each part of the pattern is a batch of small dense products of a query block with the key blocks that it visits. Parts
are combined by their softmax sums. Time and memory grow with the visited blocks: linearly in L for a window.
"""

import torch

from longspan.kernels.block_attention.dropout import PairDropout
from longspan.kernels.block_attention.pattern import Pattern
from longspan.kernels.block_attention.plan import Plan, plans, take
from longspan.kernels.block_attention.reference import Distances
from longspan.shapes import Bool, Float, Int, Tensor

_LEAST = -1e30
"""Used instead of minus infinity where differences are computed."""


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
    """The function of `reference.block_attention`."""
    H, L, K = *query.shape[1:3], key.shape[2]
    outputs, drop = [], PairDropout(dropout, query)
    for index, plan in enumerate(plans(pattern, H, L, K, query.device, first_key)):
        seen = visible(pattern, index, plan, first_key)
        out, lse = _part(query, key, value, plan, seen, position, drop)
        outputs.append(in_order(plan, out, lse))
    return combine_parts(outputs)


def _part(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    plan: Plan,
    seen: Bool[Tensor, "R G Q P NS"],
    position: Distances | None,
    dropout: PairDropout,
) -> tuple[Float[Tensor, "B H S D"], Float[Tensor, "B H S"]]:
    """The output of every slot of one part, and the logarithm of the sum of its weights."""
    scale, keys = query.shape[-1] ** -0.5, plan.visited(key).transpose(-1, -2)
    if position is None:
        scores = (plan.queries.take(query) * scale).unflatten(2, (-1, plan.P)) @ keys
    else:
        r, u, w = (t.to(query.dtype) for t in (position.r, position.u, position.w))
        content, for_position = (
            (plan.queries.take(query + bias[:, None]) * scale).unflatten(2, (-1, plan.P)) for bias in (u, w)
        )
        terms = _position_scores(for_position, r, position, plan)
        scores = torch.baddbmm(terms.flatten(0, 2), content.flatten(0, 2), keys.flatten(0, 2)).view_as(terms)
    scores = (scores if scores.dtype == torch.float64 else scores.float()).masked_fill_(~seen, float("-inf"))
    peak = scores.detach().amax(-1, keepdim=True).clamp(min=_LEAST)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True).clamp(min=1.0)  # the largest weight is 1 if any key is visible
    dropped = dropout(weights, plan.query_positions(), plan.key_positions())
    output = (dropped / total).to(value.dtype) @ plan.visited(value)
    return output.flatten(2, 3), (peak + total.log()).flatten(2)


def _position_scores(
    query: Float[Tensor, "B H Q P D"], r: Float[Tensor, "H C D"], position: Distances, plan: Plan
) -> Float[Tensor, "B H Q P NS"]:
    """q . r at the distance between every query of a block and every key that it visits."""
    P, keys = plan.P, plan.visits.shape[-1] * plan.S
    if plan.behind is None:
        gap = plan.query_positions() - plan.key_positions()
        terms = query @ r.transpose(1, 2)[:, None]
        return terms.gather(-1, position.column(gap).expand(*query.shape[:4], keys))
    # Consecutive blocks: the distance from query i to key j is behind*P + i - j steps. So the row of query i is the row
    # of distances shifted by i, and the shifted matrix is a view (kernels/relative_attention/skewed.py).
    gap = torch.arange(plan.behind * P + P - 1, plan.behind * P - keys, -1, device=query.device)
    known = r[:, position.column(gap * plan.step)]
    terms = (query @ known.transpose(1, 2)[:, None]).contiguous()
    width = P + keys - 1
    sizes, strides = terms.shape[:3], terms.stride()[:3]
    return terms.as_strided((*sizes, P, keys), (*strides, width - 1, 1), terms.storage_offset() + P - 1)


def visible(
    pattern: Pattern, index: int, plan: Plan, first_key: Int[Tensor, "B L"] | None
) -> Bool[Tensor, "R G Q P NS"]:
    """Which of the visited keys a query sees through this part. Cached, because all layers use it."""
    name = "seen" if first_key is None else "seen in documents"
    made_for, seen = plan.made.get(name, (None, None))
    if seen is None or made_for is not first_key:
        with torch.inference_mode(False):
            seen = _visible(pattern, index, plan, first_key)
        plan.made[name] = first_key, seen
    return seen


def _visible(
    pattern: Pattern, index: int, plan: Plan, first_key: Int[Tensor, "B L"] | None
) -> Bool[Tensor, "R G Q P NS"]:
    query, key = plan.query_positions(), plan.key_positions()
    head = torch.arange(key.shape[1], device=key.device)[:, None, None, None]
    there = (query >= 0) & (key >= 0)
    if first_key is None:
        return pattern.seen_first_by(index, head, query, key) & there
    first = _at(first_key, query - plan.offset)
    shown = pattern.seen_first_by(index, head, query - first, key - first) & there & (key >= first)
    return shown if pattern.causal else shown & (query >= _at(first_key, key))


def _at(first_key: Int[Tensor, "B L"], positions: Int[Tensor, "R G Q X Y"]) -> Int[Tensor, "B G Q X Y"]:
    B, found = first_key.shape[0], positions.clamp(min=0)
    return first_key.gather(1, found.expand(B, *found.shape[1:]).flatten(1)).view(B, *found.shape[1:])


def in_order(
    plan: Plan, out: Float[Tensor, "B H S D"], lse: Float[Tensor, "B H S"]
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """Slots in the order of the queries; the output of a query that the part does not concern is zero."""
    if plan.queries.run is not None:
        begin, L = plan.queries.run[0], plan.back.shape[1]
        return out.narrow(2, begin, L), lse.narrow(2, begin, L)
    slots, nothing = plan.back.clamp(min=0)[:, None], plan.back[:, None] < 0
    lse = take(lse[..., None], slots)[..., 0].masked_fill(nothing, _LEAST)
    return take(out, slots).masked_fill(nothing[..., None], 0.0), lse


def combine_parts(outputs: list[tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]]) -> Float[Tensor, "B H L D"]:
    """One softmax over all parts, from the softmax of each part."""
    if len(outputs) == 1:
        return outputs[0][0]
    sums = torch.stack([lse for _, lse in outputs]).clamp(min=_LEAST)
    weights = torch.softmax(sums, dim=0)[..., None]
    parts = zip(weights, outputs, strict=True)
    return sum((weight.to(out.dtype) * out for weight, (out, _) in parts), outputs[0][0] * 0)


def oldest_seen(pattern: Pattern, heads: int, oldest: Int[Tensor, "L"]) -> Int[Tensor, "L"]:
    """The minimum of `oldest` over the keys that each query sees: one layer of the computation of `reach`."""
    L, found = oldest.shape[0], oldest
    for index, plan in enumerate(plans(pattern, heads, L, L, oldest.device)):
        key, seen = plan.key_positions(), visible(pattern, index, plan, None)
        least = torch.where(seen, oldest[key.clamp(min=0)], L).amin((1, 4)).flatten()
        slots = plan.back[0]
        found = torch.where(slots >= 0, torch.minimum(found, least[slots.clamp(min=0)]), found)
    return found
