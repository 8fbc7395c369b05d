"""The Triton kernels that join the results of several programs for one block of queries."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from longspan.kernels.relative_attention.last_sum_kernels import cast_table, sum_biases

ROWS = 32
ROWS_AT_ONCE = tl.constexpr(ROWS)


@triton.jit(do_not_specialize=["L", "parts"])
def join_outputs_kernel(
    partial, partial_lse, out, lse, stride_ob, stride_oh, stride_ol, H, L, parts, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out = sum_p 2^(lse_p - lse) out_p with 2^lse = sum_p 2^lse_p; a part without a visible key has lse_p = -inf."""
    bh = tl.program_id(1)
    i = tl.program_id(0) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    columns = tl.arange(0, BD)
    here = (i < L)[:, None] & (columns < D)[None, :]
    acc = tl.zeros([ROWS_AT_ONCE, BD], tl.float32)
    top = tl.full([ROWS_AT_ONCE], float("-inf"), tl.float32)
    total = tl.zeros([ROWS_AT_ONCE], tl.float32)
    for part in tl.range(0, parts):
        at = (part * tl.num_programs(1) + bh).to(tl.int64) * L + i
        found = tl.load(partial_lse + at, mask=i < L, other=0.0)
        new_top = tl.maximum(top, found)
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - floor), tl.exp2(found - floor)
        o = tl.load(partial + at[:, None] * D + columns[None, :], mask=here, other=0.0)
        acc = acc * shrink[:, None] + o * weight[:, None]
        total = total * shrink + weight
        top = new_top
    out += (bh // H).to(tl.int64) * stride_ob + bh % H * stride_oh
    to = out + i[:, None] * stride_ol + columns[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=here)
    tl.store(lse + bh.to(tl.int64) * L + i, top + tl.log2(total), mask=i < L)


@triton.jit(do_not_specialize=["L", "parts", "B", "blocks", "key_blocks", "C"])
def join_gradients_kernel(
    partial, grad_biases, grad_u, grad_distance, grad_query, of_distance, of_u, of_w, stride_qb, stride_qh, stride_ql,
    stride_dh, stride_dc, stride_dd, H, L, parts, B, blocks, key_blocks, C, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sums of the parts, sums over blocks for u and w, and the cast of the gradient of the position table."""
    bh = tl.program_id(1)
    i = tl.program_id(0) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    columns = tl.arange(0, BD)
    here = (i < L)[:, None] & (columns < D)[None, :]
    total = tl.zeros([ROWS_AT_ONCE, BD], tl.float32)
    for part in tl.range(0, parts):
        at = (part * tl.num_programs(1) + bh).to(tl.int64) * L + i
        total += tl.load(partial + at[:, None] * D + columns[None, :], mask=here, other=0.0)
    grad_query += (bh // H).to(tl.int64) * stride_qb + bh % H * stride_qh
    to = grad_query + i[:, None] * stride_ql + columns[None, :]
    tl.store(to, total.to(grad_query.dtype.element_ty), mask=here)

    if (tl.program_id(0) == 0) & (bh < H):
        sum_biases(
            grad_biases, grad_u, of_u, of_w, bh, columns, H, parts * B * blocks, blocks, B * key_blocks, key_blocks,
            D, ROWS_AT_ONCE,
        )  # fmt: skip
    program, programs = bh * tl.num_programs(0) + tl.program_id(0), tl.num_programs(0) * tl.num_programs(1)
    cast_table(
        grad_distance, of_distance, stride_dh, stride_dc, stride_dd, program, programs, H, C, D, BD, ROWS_AT_ONCE
    )  # fmt: skip
