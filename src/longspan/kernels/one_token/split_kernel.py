"""The Triton kernel of a product with a long K, which several programs share."""

import triton
import triton.language as tl

from longspan.kernels.one_token.kernels import (
    activated,
    after_previous,
    deviation,
    let_next_start,
    load_gains,
    load_tile,
    scaled,
    store_tile,
)


@triton.jit
def split_kernel(
    x, weight, bias, out, residual, residual_gain, residual_shift, residual_eps, parts, tickets, B,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    INNER: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
    RESIDUAL_NORM: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program multiplies INNER columns of x. The last one to arrive adds the parts, always in the same order, so
    that the result does not depend on which one it is. Tickets only increase."""
    let_next_start(PDL)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.program_id(2) * INNER + tl.arange(0, INNER)
    FIRST: tl.constexpr = PDL or PRECISION == "ieee"
    if FIRST:
        matrix = load_tile(weight, columns, N, k, K)
    after_previous(PDL)
    tile = load_tile(x, rows, B, k, K)
    if not FIRST:
        matrix = load_tile(weight, columns, N, k, K)  # last, as in `rows_kernel`
    acc = tl.dot(tile, tl.trans(matrix), input_precision=PRECISION)
    inside = (rows < B)[:, None] & (columns < N)[None, :]
    place = rows[:, None] * N + columns[None, :]
    tl.store(parts + tl.program_id(2) * B * N + place, acc, mask=inside)
    tl.debug_barrier()  # all parts are stored before the ticket is taken
    ticket = tl.atomic_add(tickets + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), 1, sem="acq_rel")
    if ticket % SPLITS == SPLITS - 1:
        n = tl.arange(0, BN)
        if BIAS:
            biases = tl.load(bias + columns, mask=columns < N, other=0.0)
        if RESIDUAL:
            kept = load_tile(residual, rows, B, columns, N)
        if RESIDUAL_NORM:
            kept_rows = load_tile(residual, rows, B, n, N)
            gains, shifts = load_gains(residual_gain, residual_shift, columns, columns < N, RESIDUAL_NORM)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(parts + split * B * N + place, mask=inside, other=0.0, cache_modifier=".cg")
        if BIAS:
            total += biases.to(tl.float32)[None, :]
        total = activated(total, ACTIVATION)
        if RESIDUAL:
            if RESIDUAL_NORM:
                mean, scale = deviation(kept_rows, (n < N)[None, :], residual_eps, N, RESIDUAL_NORM)
                kept = scaled(kept, mean, scale, gains, shifts, RESIDUAL_NORM)
            total += kept.to(tl.float32)
        store_tile(total, out, rows, B, columns, N)
