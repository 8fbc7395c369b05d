"""Attention under a pattern with FlexAttention block masks: compiled on CUDA, one kernel per part.

It uses the same plan as gathered.py for the block lists and the same rule inside a block. Without compilation (on a
CPU, forward only) FlexAttention computes the full matrix; this is for tests only.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, no_type_check

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from longspan.kernels.block_attention.gathered import combine_parts, in_order, visible
from longspan.kernels.block_attention.pattern import Pattern
from longspan.kernels.block_attention.plan import Plan, plans
from longspan.kernels.block_attention.reference import Distances
from longspan.shapes import Float, Int, Tensor

BLOCK = 128
"""The block size of FlexAttention's kernels."""


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


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
    """The function of `reference.block_attention`; FlexAttention has no attention dropout, so `dropout` must be 0."""
    assert dropout == 0.0
    H, L, K = *query.shape[1:3], key.shape[2]
    outputs = []
    for index, plan in enumerate(plans(pattern, H, L, K, query.device, first_key, BLOCK)):
        mask = block_mask(pattern, index, plan, first_key)
        queries, keys, values = plan.queries.take(query), plan.keys.take(key), plan.keys.take(value)
        score = None
        if position is not None:
            queries, score = _positions(query, plan, position)
        out, aux = _attend(queries, keys, values, score, mask)
        outputs.append(in_order(plan, out, aux.lse))
    return combine_parts(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, score: Callable | None, mask: BlockMask) -> tuple[Tensor, Any]:
    options: Any = {"score_mod": score, "block_mask": mask, "return_aux": AuxRequest(lse=True)}
    if not query.is_cuda:
        return flex_attention(query, key, value, **options)
    # Every shape and pattern has its own kernel, and a model with many windows needs more than the default limit.
    with torch._dynamo.config.patch(recompile_limit=256):
        return _compiled()(query, key, value, **options)


def _positions(query: Float[Tensor, "B H L D"], plan: Plan, position: Distances) -> tuple[Tensor, Callable]:
    """q + u in slots, and the function that adds the position terms to a score."""
    r, u, w = (t.to(query.dtype) for t in (position.r, position.u, position.w))
    terms = plan.queries.take(query + w[:, None]) @ r.transpose(1, 2) * query.shape[-1] ** -0.5
    positions, keys = _tables(plan)
    far, ahead, step, shared = r.shape[1] - 1 - position.ahead, position.ahead, position.step, len(positions) == 1

    @no_type_check
    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b * 0 if shared else b
        gap = (positions[row, i] - keys[row, j]) // step
        return score + terms[b, h, i, far - torch.clamp(gap, -ahead, far)]

    return plan.queries.take(query + u[:, None]), add


def block_mask(pattern: Pattern, index: int, plan: Plan, first_key: Int[Tensor, "B L"] | None) -> BlockMask:
    """The blocks that each query block visits, and the rule inside them. Cached for segments without document
    starts."""
    if first_key is None and "mask" in plan.made:
        return plan.made["mask"]
    with torch.inference_mode(False):
        R, G, Q, N = plan.visits.shape
        lengths = (plan.queries.index.shape[1], plan.keys.index.shape[1])
        rule = _rule(pattern, index, plan, first_key)
        visited = plan.visits >= 0
        full = torch.zeros_like(visited)
        if first_key is None and G == 1:  # random blocks are smaller than a kernel's, so never full
            seen = visible(pattern, index, plan, None).expand(R, G, Q, plan.P, N * plan.S)
            full = seen.unflatten(-1, (N, plan.S)).all(5).all(3) & visited
        lists = (_lists(plan.visits, chosen, lengths[1] // plan.S) for chosen in (visited & ~full, full))
        (count, blocks), (full_count, full_blocks) = lists
        made = BlockMask.from_kv_blocks(
            count,
            blocks,
            full_count,
            full_blocks,
            BLOCK_SIZE=(plan.P, plan.S),
            mask_mod=rule,
            seq_lengths=lengths,
        )
        if first_key is None:
            plan.made.pop("seen", None)
            plan.made["mask"] = made
        return made


def _lists(visits: Int[Tensor, "R G Q N"], chosen: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """The number of key blocks that each query block visits, and their indices first, in the format of
    FlexAttention."""
    order = torch.argsort((~chosen).int(), dim=-1, stable=True)
    first = visits.gather(-1, order).clamp(min=0).int()
    listed = torch.nn.functional.pad(first, (0, max(blocks - first.shape[-1], 0)))[..., :blocks]
    return chosen.sum(-1).int(), listed.contiguous()


def _rule(pattern: Pattern, index: int, plan: Plan, first_key: Int[Tensor, "B L"] | None) -> Callable:
    """The rule of the pattern as a function of slots."""
    positions, keys = _tables(plan)
    for part in pattern.parts[: index + 1]:
        part.prepare(positions.device)
    shared, causal, offset = len(positions) == 1, pattern.causal, plan.offset
    first = None if first_key is None else first_key.int()

    @no_type_check
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b * 0 if shared else b
        query, key = positions[row, i], keys[row, j]
        there = (query >= 0) & (key >= 0)
        if first is None:
            return pattern.seen_first_by(index, h, query, key) & there
        begin = first[b, torch.clamp(query - offset, min=0)]
        shown = pattern.seen_first_by(index, h, query - begin, key - begin) & there & (key >= begin)
        return shown if causal else shown & (query >= first[b, torch.clamp(key, min=0)])

    return seen


def _tables(plan: Plan) -> tuple[Int[Tensor, "R SQ"], Int[Tensor, "R SK"]]:
    """The position of each slot of queries and keys."""
    if "tables" not in plan.made:
        with torch.inference_mode(False):
            plan.made["tables"] = plan.query_positions().flatten(1).int(), plan.keys.index.int()
    return plan.made["tables"]
