"""The last sums of the backward pass: gradients of u, w and the position table, in their dtypes and layout."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def column_sums(base, h, columns, H, count, blocks, D: tl.constexpr, ROWS: tl.constexpr):
    """Sums of a [count / blocks, H, blocks, D] tensor over all axes but the heads, for one head and some columns."""
    total = tl.zeros([ROWS, columns.shape[0]], tl.float32)
    for first in tl.range(0, count, ROWS):
        n = first + tl.arange(0, ROWS)
        rows = (n // blocks * H + h) * blocks + n % blocks
        mask = (n < count)[:, None] & (columns < D)[None, :]
        total += tl.load(base + rows[:, None] * D + columns[None, :], mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def sum_biases(
    grad_biases, grad_u, of_u, of_w, h, columns, H, count, blocks, key_count, key_blocks,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of u and w of one head, in some columns. `grad_biases` are the shares of u + w of `count` blocks."""
    both = column_sums(grad_biases, h, columns, H, count, blocks, D, ROWS)
    share = column_sums(grad_u, h, columns, H, key_count, key_blocks, D, ROWS)
    tl.store(of_u + h * D + columns, share.to(of_u.dtype.element_ty), mask=columns < D)
    tl.store(of_w + h * D + columns, (both - share).to(of_w.dtype.element_ty), mask=columns < D)


@triton.jit
def cast_table(
    grad_distance, of_distance, stride_dh, stride_dc, stride_dd, program, programs, H, C,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """This program's share of the rows of the position table, which are taken in turn, one head after the other."""
    columns = tl.arange(0, BD)
    for first in tl.range(program * ROWS, H * C, programs * ROWS):
        n = first + tl.arange(0, ROWS)
        here = (n < H * C)[:, None] & (columns < D)[None, :]
        found = tl.load(grad_distance + n[:, None] * D + columns[None, :], mask=here)
        to = of_distance + (n // C * stride_dh + n % C * stride_dc)[:, None] + columns[None, :] * stride_dd
        tl.store(to, found.to(of_distance.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["C", "count", "blocks", "key_count", "key_blocks"])
def finish_kernel(
    grad_biases, grad_u, grad_distance, of_distance, of_u, of_w, stride_dh, stride_dc, stride_dd,
    H, C, count, blocks, key_count, key_blocks,
    D: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TABLE_ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of u and w, GROUP columns per program, and of the position table."""
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    program = tl.program_id(0)
    if program < H * groups:
        columns = program % groups * GROUP + tl.arange(0, GROUP)
        sum_biases(
            grad_biases, grad_u, of_u, of_w, program // groups, columns, H, count, blocks, key_count, key_blocks,
            D, ROWS,
        )  # fmt: skip
    cast_table(
        grad_distance, of_distance, stride_dh, stride_dc, stride_dd, program, tl.num_programs(0), H, C,
        D, BD, TABLE_ROWS,
    )  # fmt: skip
