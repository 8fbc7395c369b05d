"""One kernel for a complete step of one row: all layers and the head, with a barrier over the grid between phases.

A layer has five phases, and every program computes some rows of each product. A program loads its weights (or keys,
values and position keys) before it waits for the others, so the latency of memory overlaps with the barrier. The same
kernel without barriers runs one phase per launch, which the interpreter and the tests need.

Activations are float32. Every sum has a fixed order, so a step is deterministic.
"""

import triton
import triton.language as tl

from longspan.kernels.one_token.kernels import LAYER

# Entries of a layer in the table of addresses.
QKV = tl.constexpr(0)
OUTPUT = tl.constexpr(1)
UP = tl.constexpr(2)
UP_BIAS = tl.constexpr(3)
DOWN = tl.constexpr(4)
DOWN_BIAS = tl.constexpr(5)
ATTENTION_GAIN = tl.constexpr(6)
ATTENTION_SHIFT = tl.constexpr(7)
FEED_FORWARD_GAIN = tl.constexpr(8)
FEED_FORWARD_SHIFT = tl.constexpr(9)
KEYS = tl.constexpr(10)
VALUES = tl.constexpr(11)
DISTANCE = tl.constexpr(12)
U = tl.constexpr(13)
W = tl.constexpr(14)
QUERY_GAIN = tl.constexpr(15)
KEY_GAIN = tl.constexpr(16)
ENTRIES = tl.constexpr(17)

# Bits of the phases.
PROJECT, ATTEND, MIX, EXPAND, CONTRACT, HEAD = (tl.constexpr(1 << bit) for bit in range(6))

# $1: arrivals, their number before this launch, and a flag. Thread 0 speaks for its program.
ARRIVE = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p red.release.gpu.global.add.u64 [$1], 1;
mov.u32 $0, 0;
}""")
# $2: arrivals to wait for. Gives up after about half a second and sets the flag: a wait without an end would block the
# device.
WAIT = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
.reg .b64 v;
mov.u32 t, %tid.x;
setp.ne.u32 p, t, 0;
@p bra DONE;
mov.u32 t, 0;
AGAIN:
ld.acquire.gpu.global.u64 v, [$1];
setp.ge.s64 p, v, $2;
@p bra DONE;
add.u32 t, t, 1;
setp.lt.u32 p, t, 400000;
@p bra AGAIN;
mov.u64 v, 1;
st.global.u64 [$1+16], v;
DONE:
mov.u32 $0, 0;
}""")


@triton.jit
def arrive(sync, GRID: tl.constexpr):
    """This program has written everything that the next phase reads. Arriving before the loads of the next phase keeps
    them out of what the release has to wait for."""
    if GRID:
        tl.debug_barrier()
        tl.inline_asm_elementwise(ARRIVE, "=r,l", [sync], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait(sync, target, GRID: tl.constexpr):
    """Wait until every program has arrived, and return the next target."""
    if GRID:
        tl.inline_asm_elementwise(WAIT, "=r,l,l", [sync, target], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
    return target + tl.num_programs(0)


@triton.jit
def entry(table, n, which: tl.constexpr, like):
    """The address of a tensor of layer n, as a pointer to the model's dtype."""
    address = tl.load(table + n * ENTRIES + which)
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit
def load_rows(matrix, rows, N, K: tl.constexpr, BK: tl.constexpr):
    k = tl.arange(0, BK)
    return tl.load(matrix + rows[:, None] * K + k[None, :], mask=(rows < N)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def load_vector(x, K: tl.constexpr, BK: tl.constexpr):
    """A vector that other programs wrote: not from the L1 cache."""
    k = tl.arange(0, BK)
    return tl.load(x + k, mask=k < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def moments(x, eps, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """Mean (0 for RMS) and reciprocal deviation of a vector."""
    mean = 0.0
    if KIND == LAYER:
        mean = tl.sum(x, 0) / K
    away = tl.where(tl.arange(0, BK) < K, x - mean, 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(away * away, 0) / K + eps)


@triton.jit
def scaled(x, at, K, mean, scale, gain, shift, KIND: tl.constexpr):
    """The entries `at` of a normalised vector."""
    inside = at < K
    x = (x - mean) * scale * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == LAYER:
        x += tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def normalised(x, gain, shift, eps, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    mean, scale = moments(x, eps, K, BK, KIND)
    return scaled(x, tl.arange(0, BK), K, mean, scale, gain, shift, KIND)


@triton.jit
def residual(
    x, at, gain, shift, eps, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The entries `at` of x, normalised if NORM."""
    here = tl.load(x + at, mask=at < K, other=0.0, cache_modifier=".cg")
    if NORM:
        mean, scale = moments(load_vector(x, K, BK), eps, K, BK, KIND)
        here = scaled(here, at, K, mean, scale, gain, shift, KIND)
    return here


@triton.jit
def product(matrix, x):
    return tl.sum(matrix.to(tl.float32) * x[None, :], 1)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        x = tl.maximum(x, 0.0)
    if ACTIVATION == 2:
        x = tl.maximum(x, 0.0)
        x = x * x
    if ACTIVATION == 3:
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return x


@triton.jit
def load_slots(table, n, like, h, s, slot, filled, S, C, D: tl.constexpr, BD: tl.constexpr):
    """Keys, values and position keys of the slots s of a head, and which slots are visible. The newest is not stored
    yet: its key and value are zeros."""
    columns = tl.arange(0, BD)
    away = slot - s
    away = tl.where(away < 0, away + S, away)
    seen = (s < S) & (away < filled)
    inside = seen[:, None] & (columns < D)[None, :]
    offsets = (h * S + s)[:, None] * D + columns[None, :]
    older = inside & (s != slot)[:, None]
    k = tl.load(entry(table, n, KEYS, like) + offsets, mask=older, other=0.0)
    v = tl.load(entry(table, n, VALUES, like) + offsets, mask=older, other=0.0)
    # Columns of the table descend to distance 0; distances beyond it use the first column.
    far = (h * C + C - 1 - tl.minimum(away, C - 1))[:, None] * D + columns[None, :]
    r = tl.load(entry(table, n, DISTANCE, like) + far, mask=inside, other=0.0)
    return k, v, r, seen


@triton.jit
def head_vector(
    qkv, which: tl.constexpr, h, gain, eps, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Query, key or value of a head, with its RMS norm if NORM."""
    columns = tl.arange(0, BD)
    x = tl.load(qkv + (which * H + h) * D + columns, mask=columns < D, other=0.0, cache_modifier=".cg")
    if NORM:
        x = normalised(x, gain, gain, eps, D, BD, 2)
    return x


@triton.jit
def attend(
    table, n, like, qkv, partial, sync, target, written, S, C, chunk, head_eps, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    HEAD_NORM: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """A part of the softmax: `chunk` slots of one head. Stores the sum, the largest score and the total."""
    arrive(sync, GRID)
    program = tl.program_id(0)
    h, split = program // SPLITS, program % SPLITS
    slot = (written % S).to(tl.int32)
    filled = tl.where(h < H, tl.minimum(written + 1, S), 0).to(tl.int32)  # a program without a head sees nothing
    columns = tl.arange(0, BD)
    s = tl.arange(0, SLOTS)
    begin, end = split * chunk, tl.minimum(split * chunk + chunk, S)
    k, v, r, seen = load_slots(table, n, like, h, tl.where(begin + s < end, begin + s, S), slot, filled, S, C, D, BD)
    target = wait(sync, target, GRID)
    if h < H:
        q = head_vector(qkv, 0, h, entry(table, n, QUERY_GAIN, like), head_eps, H, D, BD, HEAD_NORM)
        new_key = head_vector(qkv, 1, h, entry(table, n, KEY_GAIN, like), head_eps, H, D, BD, HEAD_NORM).to(k.dtype)
        new_value = head_vector(qkv, 2, h, qkv, head_eps, H, D, BD, False).to(v.dtype)
        own = (begin <= slot) & (slot < end) & (columns < D)
        tl.store(entry(table, n, KEYS, like) + (h * S + slot) * D + columns, new_key, mask=own)
        tl.store(entry(table, n, VALUES, like) + (h * S + slot) * D + columns, new_value, mask=own)
        qu = (q + tl.load(entry(table, n, U, like) + h * D + columns, mask=columns < D, other=0.0)) * scale
        qw = (q + tl.load(entry(table, n, W, like) + h * D + columns, mask=columns < D, other=0.0)) * scale
        acc = tl.zeros([BD], tl.float32)
        top = float("-inf")
        total = 0.0
        for first in range(begin, end, SLOTS):
            newest = (first + s == slot)[:, None]
            key = tl.where(newest, new_key[None, :], k).to(tl.float32)
            value = tl.where(newest, new_value[None, :], v).to(tl.float32)
            scores = tl.sum(key * qu[None, :] + r.to(tl.float32) * qw[None, :], 1)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 0))
            floor = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp(scores - floor)
            shrink = tl.exp(top - floor)
            total = total * shrink + tl.sum(weights, 0)
            acc = acc * shrink + tl.sum(weights[:, None] * value, 0)
            top = new_top
            if first + SLOTS < end:
                after = first + SLOTS + s
                k, v, r, seen = load_slots(
                    table, n, like, h, tl.where(after < end, after, S), slot, filled, S, C, D, BD
                )
        tl.store(partial + (split * H + h) * D + columns, acc, mask=columns < D)
        edge = partial + SPLITS * H * D + split * H + h
        tl.store(edge, top)
        tl.store(edge + SPLITS * H, total)
    return target


@triton.jit
def combined(
    partial, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The outputs of all heads, from the parts of their softmax: a vector with BD entries per head."""
    split, h, d = tl.arange(0, PADDED), tl.arange(0, BH), tl.arange(0, BD)
    there = (split < SPLITS)[:, None] & (h < H)[None, :]
    edge = partial + SPLITS * H * D + split[:, None] * H + h[None, :]
    tops = tl.load(edge, mask=there, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(edge + SPLITS * H, mask=there, other=0.0, cache_modifier=".cg")
    sums = tl.load(
        partial + (split[:, None, None] * H + h[None, :, None]) * D + d[None, None, :],
        mask=there[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    top = tl.max(tops, 0)
    share = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(totals * share, 0)
    share = share / tl.where(total == 0.0, 1.0, total)[None, :]
    return tl.reshape(tl.sum(sums * share[:, :, None], 0), [BH * BD])


@triton.jit
def load_output_rows(matrix, rows, N, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows of the output projection, with BD columns per head."""
    i = tl.arange(0, BH * BD)
    inside = (rows < N)[:, None] & ((i // BD < H) & (i % BD < D))[None, :]
    return tl.load(matrix + rows[:, None] * (H * D) + (i // BD * D + i % BD)[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["S", "C", "chunk", "first", "last"])
def step_kernel(
    tokens, embedding, head, head_bias, final_gain, final_shift, table, logits, xs, sums, qkv, partial, inner, count,
    sync, S, C, chunk, first, last, embedding_scale, head_scale, eps, final_eps, head_eps, scale,
    V: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BH: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, LAYERS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, SLOTS: tl.constexpr, QKV_ROWS: tl.constexpr, E_ROWS: tl.constexpr, F_ROWS: tl.constexpr,
    V_ROWS: tl.constexpr, PRE: tl.constexpr, KIND: tl.constexpr, FINAL: tl.constexpr, HEAD_NORM: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PHASES: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """The layers from `first` to before `last`, and the head if PHASES has it."""
    program = tl.program_id(0)
    written = tl.load(count)
    target = tl.load(sync + 1) + tl.num_programs(0)
    p_rows = program * QKV_ROWS + tl.arange(0, QKV_ROWS)
    e_rows = program * E_ROWS + tl.arange(0, E_ROWS)
    f_rows = program * F_ROWS + tl.arange(0, F_ROWS)
    for n in range(first, last):
        x_row, before = xs + n * E, tl.maximum(n - 1, 0)
        a_gain, a_shift = entry(table, n, ATTENTION_GAIN, head), entry(table, n, ATTENTION_SHIFT, head)
        f_gain, f_shift = entry(table, n, FEED_FORWARD_GAIN, head), entry(table, n, FEED_FORWARD_SHIFT, head)
        b_gain, b_shift = entry(table, before, FEED_FORWARD_GAIN, head), entry(table, before, FEED_FORWARD_SHIFT, head)
        if PROJECT & PHASES:
            if n > 0:
                arrive(sync, GRID)
            matrix = load_rows(entry(table, n, QKV, head), p_rows, 3 * H * D, E, BE)
            if n == 0:
                # Every program writes the same vector, so no barrier is needed before it is read.
                k = tl.arange(0, BE)
                token = tl.maximum(tl.load(tokens), 0)
                vector = tl.load(embedding + token * E + k, mask=k < E, other=0.0).to(tl.float32) * embedding_scale
                tl.store(xs + k, vector, mask=k < E)
                tl.debug_barrier()
            else:
                target = wait(sync, target, GRID)
            x = load_vector(x_row, E, BE)
            if PRE:
                x = normalised(x, a_gain, a_shift, eps, E, BE, KIND)
            elif n > 0:
                x = normalised(x, b_gain, b_shift, eps, E, BE, KIND)
            tl.store(qkv + p_rows, product(matrix, x), mask=p_rows < 3 * H * D)
        if ATTEND & PHASES:
            target = attend(
                table, n, head, qkv, partial, sync, target, written, S, C, chunk, head_eps, scale,
                H, D, BD, SPLITS, SLOTS, HEAD_NORM, GRID,
            )  # fmt: skip
        if MIX & PHASES:
            arrive(sync, GRID)
            matrix = load_output_rows(entry(table, n, OUTPUT, head), e_rows, E, H, BH, D, BD)
            target = wait(sync, target, GRID)
            y = product(matrix, combined(partial, H, BH, D, BD, SPLITS, PADDED))
            if PRE:
                y += residual(x_row, e_rows, b_gain, b_shift, eps, E, BE, KIND, False)
            elif n > 0:
                y += residual(x_row, e_rows, b_gain, b_shift, eps, E, BE, KIND, True)
            else:
                y += residual(x_row, e_rows, b_gain, b_shift, eps, E, BE, KIND, False)
            tl.store(sums + e_rows, y, mask=e_rows < E)
        if EXPAND & PHASES:
            arrive(sync, GRID)
            matrix = load_rows(entry(table, n, UP, head), f_rows, F, E, BE)
            target = wait(sync, target, GRID)
            x = load_vector(sums, E, BE)
            if PRE:
                x = normalised(x, f_gain, f_shift, eps, E, BE, KIND)
            else:
                x = normalised(x, a_gain, a_shift, eps, E, BE, KIND)
            y = product(matrix, x)
            if BIAS:
                y += tl.load(entry(table, n, UP_BIAS, head) + f_rows, mask=f_rows < F, other=0.0).to(tl.float32)
            tl.store(inner + f_rows, activated(y, ACTIVATION), mask=f_rows < F)
        if CONTRACT & PHASES:
            arrive(sync, GRID)
            matrix = load_rows(entry(table, n, DOWN, head), e_rows, E, F, BF)
            target = wait(sync, target, GRID)
            y = product(matrix, load_vector(inner, F, BF))
            if BIAS:
                y += tl.load(entry(table, n, DOWN_BIAS, head) + e_rows, mask=e_rows < E, other=0.0).to(tl.float32)
            y += residual(sums, e_rows, a_gain, a_shift, eps, E, BE, KIND, not PRE)
            tl.store(x_row + E + e_rows, y, mask=e_rows < E)
    if HEAD & PHASES:
        arrive(sync, GRID)
        v_rows = program * V_ROWS + tl.arange(0, V_ROWS)
        matrix = load_rows(head, v_rows, V, E, BE)
        target = wait(sync, target, GRID)
        x = load_vector(xs + LAYERS * E, E, BE)
        if not PRE:
            gain, shift = (
                entry(table, LAYERS - 1, FEED_FORWARD_GAIN, head),
                entry(table, LAYERS - 1, FEED_FORWARD_SHIFT, head),
            )
            x = normalised(x, gain, shift, eps, E, BE, KIND)
        if FINAL:
            x = normalised(x, final_gain, final_shift, final_eps, E, BE, FINAL)
        y = product(matrix, x) + tl.load(head_bias + v_rows, mask=v_rows < V, other=0.0).to(tl.float32)
        # Without a barrier that all programs passed, the result is wrong: NaN, which the sampler reports.
        failed = tl.load(sync + 2, volatile=True)
        y = tl.where(failed != 0, float("nan"), y * head_scale)
        tl.store(logits + v_rows, y, mask=v_rows < V)
        if program == 0:
            tl.store(count, written + 1)
            if GRID:
                tl.store(sync + 1, target - tl.num_programs(0))
