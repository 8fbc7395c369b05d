"""One kernel for a complete step of one row: all layers and the head.

A layer has six phases, and every program computes some rows of each product. There is no barrier between phases. A
value is stored together with the number of the step in one 64-bit word, and a reader polls the words it needs until all
have that number (the LL protocol of NCCL): one trip through the L2 cache instead of a fence, a counter and a load.
Before it polls, a program loads its weights (or keys, values and position keys), so the latency of memory overlaps with
the wait. Weights, keys and values exceed the L2 cache, so every step reads them from memory. Prefetching them into the
L2 cache a layer ahead was slower (docs/LOG.md).

The same kernel runs one phase per launch for the interpreter and the tests. Activations are float32. Every sum has a
fixed order, so a step is deterministic.
"""

import triton
import triton.language as tl

from longspan.kernels.one_token.kernels import LAYER, activated, beyond
from longspan.kernels.one_token.message_kernels import receive, receive_three, receive_vector, send
from longspan.kernels.one_token.table_kernels import (
    ATTENTION_GAIN,
    DISTANCE,
    DOWN,
    DOWN_BIAS,
    FEED_FORWARD_GAIN,
    KEY_GAIN,
    KEYS,
    OUTPUT,
    QKV,
    QUERY_GAIN,
    UP,
    UP_BIAS,
    VALUES,
    U,
    W,
    entry,
)

# Bits of the phases.
PROJECT, ATTEND, COMBINE, MIX, EXPAND, CONTRACT, HEAD = (tl.constexpr(1 << bit) for bit in range(7))


@triton.jit
def load_rows(matrix, rows, N, K: tl.constexpr, BK: tl.constexpr):
    k = tl.arange(0, BK)
    return tl.load(matrix + rows[:, None] * K + k[None, :], mask=(rows < N)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def load_at(x, at, K):
    return tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)


@triton.jit
def moments(x, eps, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """Mean (0 for RMS) and reciprocal deviation of a vector."""
    mean = 0.0
    if KIND == LAYER:
        mean = tl.sum(x, 0) / K
    away = tl.where(tl.arange(0, BK) < K, x - mean, 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(away * away, 0) / K + eps)


@triton.jit
def normalised(x, gain, shift, eps, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """`gain` and `shift` are vectors that were loaded before."""
    mean, scale = moments(x, eps, K, BK, KIND)
    return (x - mean) * scale * gain + shift


@triton.jit
def pick(x, at, BK: tl.constexpr):
    """The entries `at` of a vector."""
    return tl.sum(tl.where(at[:, None] == tl.arange(0, BK)[None, :], x[None, :], 0.0), 1)


@triton.jit
def load_norm(table, n, like, gain: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """Gain and shift of a norm; the shift of an RMS norm is 0."""
    k = tl.arange(0, BK)
    shift = tl.zeros([BK], tl.float32)
    if KIND == LAYER:
        shift = load_at(entry(table, n, gain + 1, like), k, K)
    return load_at(entry(table, n, gain, like), k, K), shift


@triton.jit
def product(matrix, x):
    return tl.sum(matrix.to(tl.float32) * x[None, :], 1)


@triton.jit
def distances(slot, s, S):
    """From the newest slot back to the slots s."""
    away = slot - s
    return tl.where(away < 0, away + S, away)


@triton.jit
def load_slots(table, n, like, h, s, slot, filled, S, C, D: tl.constexpr, BD: tl.constexpr):
    """Keys, values and position keys of the slots s of a head, and which slots are visible. The newest is not stored
    yet: its key and value are zeros."""
    columns = tl.arange(0, BD)
    away = distances(slot, s, S)
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
def rms(x, gain, eps, D: tl.constexpr, NORM: tl.constexpr):
    """The RMS norm of a query or key, if NORM."""
    if NORM:
        x = x / tl.sqrt(tl.sum(x * x, 0) / D + eps) * gain
    return x


@triton.jit
def head_gain(table, n, which: tl.constexpr, like, D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr):
    gain = tl.zeros([BD], tl.float32)
    if NORM:
        gain = load_at(entry(table, n, which, like), tl.arange(0, BD), D)
    return gain


@triton.jit
def head_vectors(qkv, h, epoch, failed, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Query, key and value of a head."""
    part, d = tl.arange(0, 4)[:, None], tl.arange(0, BD)[None, :]
    found = receive(qkv, (part * H + h) * D + d, (part < 3) & (d < D), epoch, failed)
    query = tl.sum(tl.where(part == 0, found, 0.0), 0)
    key = tl.sum(tl.where(part == 1, found, 0.0), 0)
    return query, key, tl.sum(tl.where(part == 2, found, 0.0), 0)


@triton.jit
def attend(
    table, n, like, qkv, partial, epoch, failed, written, S, C, chunk, head_eps, scale, discount,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    HEAD_NORM: tl.constexpr, DISCOUNT: tl.constexpr,
):  # fmt: skip
    """A part of the softmax: `chunk` slots of one head. Sends the sum, the largest score and the total."""
    program = tl.program_id(0)
    h, split = program // SPLITS, program % SPLITS
    if h < H:
        slot = (written % S).to(tl.int32)
        filled = tl.minimum(written + 1, S).to(tl.int32)
        d, s = tl.arange(0, BD), tl.arange(0, SLOTS)
        begin, end = split * chunk, tl.minimum(split * chunk + chunk, S)
        here = tl.where(begin + s < end, begin + s, S)
        k, v, r, seen = load_slots(table, n, like, h, here, slot, filled, S, C, D, BD)
        u, w = (load_at(entry(table, n, U, like) + h * D, d, D), load_at(entry(table, n, W, like) + h * D, d, D))
        q_gain = head_gain(table, n, QUERY_GAIN, like, D, BD, HEAD_NORM)
        k_gain = head_gain(table, n, KEY_GAIN, like, D, BD, HEAD_NORM)
        q, new_key, new_value = head_vectors(qkv, h, epoch, failed, H, D, BD)
        q = rms(q, q_gain, head_eps, D, HEAD_NORM)
        new_key = rms(new_key, k_gain, head_eps, D, HEAD_NORM).to(k.dtype)
        new_value = new_value.to(v.dtype)
        qu, qw = (q + u) * scale, (q + w) * scale
        acc = tl.zeros([BD], tl.float32)
        top = float("-inf")
        total = 0.0
        for first in range(begin, end, SLOTS):
            newest = (first + s == slot)[:, None]
            key = tl.where(newest, new_key[None, :], k).to(tl.float32)
            value = tl.where(newest, new_value[None, :], v).to(tl.float32)
            scores = tl.sum(key * qu[None, :] + r.to(tl.float32) * qw[None, :], 1)
            if DISCOUNT:
                scores -= discount * beyond(distances(slot, first + s, S), C)
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
                after = tl.where(after < end, after, S)
                k, v, r, seen = load_slots(table, n, like, h, after, slot, filled, S, C, D, BD)
        send(partial + (split * H + h) * D, d, d < D, acc, epoch)
        edge = tl.arange(0, 2)
        send(
            partial + SPLITS * H * D + split * H + h, edge * (SPLITS * H), edge < 2,
            tl.where(edge == 0, top, total), epoch,
        )  # fmt: skip
        own = (begin <= slot) & (slot < end) & (d < D)
        tl.store(entry(table, n, KEYS, like) + (h * S + slot) * D + d, new_key, mask=own)
        tl.store(entry(table, n, VALUES, like) + (h * S + slot) * D + d, new_value, mask=own)


@triton.jit
def combined(
    partial, i, epoch, failed, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The outputs i of all heads, from the parts of their softmax."""
    split = tl.arange(0, PADDED)[:, None]
    inside = (split < SPLITS) & (i < H * D)[None, :]
    edge = SPLITS * H * D + split * H + (i // D)[None, :]
    sums, tops, totals = receive_three(
        partial, split * (H * D) + i[None, :], edge, edge + SPLITS * H, inside, epoch, failed
    )  # fmt: skip
    tops = tl.where(inside, tops, float("-inf"))
    top = tl.max(tops, 0)
    share = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(totals * share, 0)
    return tl.sum(sums * share, 0) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def layer_input(x_box, tokens, embedding, embedding_scale, n, epoch, failed, E: tl.constexpr, BE: tl.constexpr):
    """The complete input of layer n before its norm."""
    if n == 0:
        token = tl.maximum(tl.load(tokens), 0)
        x = load_at(embedding + token * E, tl.arange(0, BE), E) * embedding_scale
    else:
        x = receive_vector(x_box, epoch, failed, E, BE)
    return x


@triton.jit
def normed_input(
    table, n, like, x_box, tokens, embedding, embedding_scale, epoch, failed, eps,
    E: tl.constexpr, BE: tl.constexpr, PRE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The input of layer n that is multiplied, and the one that is added to its result."""
    if PRE:
        gain, shift = load_norm(table, n, like, ATTENTION_GAIN, E, BE, KIND)
    else:
        gain, shift = load_norm(table, tl.maximum(n - 1, 0), like, FEED_FORWARD_GAIN, E, BE, KIND)
    x = layer_input(x_box, tokens, embedding, embedding_scale, n, epoch, failed, E, BE)
    normed = normalised(x, gain, shift, eps, E, BE, KIND)
    if not PRE:
        normed = tl.where(n > 0, normed, x)
        x = normed
    return normed, x


@triton.jit
def normed_sums(
    table, n, like, sums, epoch, failed, eps, E: tl.constexpr, BE: tl.constexpr, PRE: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """The same for the feed-forward layer."""
    if PRE:
        gain, shift = load_norm(table, n, like, FEED_FORWARD_GAIN, E, BE, KIND)
    else:
        gain, shift = load_norm(table, n, like, ATTENTION_GAIN, E, BE, KIND)
    x = receive_vector(sums, epoch, failed, E, BE)
    normed = normalised(x, gain, shift, eps, E, BE, KIND)
    if not PRE:
        x = normed
    return normed, x


@triton.jit(do_not_specialize=["S", "C", "chunk", "first", "last"])
def step_kernel(
    tokens, embedding, head, head_bias, final_gain, final_shift, table, logits, boxes, count, epochs, failed,
    S, C, chunk, first, last, embedding_scale, head_scale, eps, final_eps, head_eps, scale, discount,
    V: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BI: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, LAYERS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, SLOTS: tl.constexpr, QKV_ROWS: tl.constexpr, I_ROWS: tl.constexpr, E_ROWS: tl.constexpr,
    F_ROWS: tl.constexpr, V_ROWS: tl.constexpr, PRE: tl.constexpr, KIND: tl.constexpr, FINAL: tl.constexpr,
    HEAD_NORM: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DISCOUNT: tl.constexpr,
    PHASES: tl.constexpr,
):  # fmt: skip
    """The layers from `first` to before `last`, and the head if PHASES has it."""
    I: tl.constexpr = H * D  # noqa: E741 (the width inside the attention)
    BOX: tl.constexpr = 4 * I + SPLITS * (I + 2 * H) + 2 * E + F
    program = tl.program_id(0)
    written = tl.load(count)
    epoch = tl.load(epochs + program) + 1
    p_rows = program * QKV_ROWS + tl.arange(0, QKV_ROWS)
    i_rows = program * I_ROWS + tl.arange(0, I_ROWS)
    e_rows = program * E_ROWS + tl.arange(0, E_ROWS)
    f_rows = program * F_ROWS + tl.arange(0, F_ROWS)
    for n in range(first, last):
        qkv = boxes + n * BOX
        partial = qkv + 3 * I
        attended = partial + SPLITS * (I + 2 * H)
        sums = attended + I
        inner = sums + E
        out = inner + F
        x_box = out - BOX
        if PROJECT & PHASES:
            matrix = load_rows(entry(table, n, QKV, head), p_rows, 3 * I, E, BE)
            normed, kept = normed_input(
                table, n, head, x_box, tokens, embedding, embedding_scale, epoch, failed, eps, E, BE, PRE, KIND
            )  # fmt: skip
            send(qkv, p_rows, p_rows < 3 * I, product(matrix, normed), epoch)
            kept_rows = pick(kept, e_rows, BE)
        if ATTEND & PHASES:
            attend(
                table, n, head, qkv, partial, epoch, failed, written, S, C, chunk, head_eps, scale, discount,
                H, D, BD, SPLITS, SLOTS, HEAD_NORM, DISCOUNT,
            )  # fmt: skip
        if COMBINE & PHASES:
            y = combined(partial, i_rows, epoch, failed, H, D, SPLITS, PADDED)
            send(attended, i_rows, i_rows < I, y, epoch)
        if MIX & PHASES:
            matrix = load_rows(entry(table, n, OUTPUT, head), e_rows, E, I, BI)
            if not (PROJECT & PHASES):
                _, kept = normed_input(
                    table, n, head, x_box, tokens, embedding, embedding_scale, epoch, failed, eps, E, BE, PRE, KIND
                )  # fmt: skip
                kept_rows = pick(kept, e_rows, BE)
            y = product(matrix, receive_vector(attended, epoch, failed, I, BI)) + kept_rows
            send(sums, e_rows, e_rows < E, y, epoch)
        if EXPAND & PHASES:
            matrix = load_rows(entry(table, n, UP, head), f_rows, F, E, BE)
            bias = tl.zeros([F_ROWS], tl.float32)
            if BIAS:
                bias = load_at(entry(table, n, UP_BIAS, head), f_rows, F)
            normed, kept = normed_sums(table, n, head, sums, epoch, failed, eps, E, BE, PRE, KIND)
            send(inner, f_rows, f_rows < F, activated(product(matrix, normed) + bias, ACTIVATION), epoch)
            kept_rows = pick(kept, e_rows, BE)
        if CONTRACT & PHASES:
            matrix = load_rows(entry(table, n, DOWN, head), e_rows, E, F, BF)
            if not (EXPAND & PHASES):
                _, kept = normed_sums(table, n, head, sums, epoch, failed, eps, E, BE, PRE, KIND)
                kept_rows = pick(kept, e_rows, BE)
            if BIAS:
                kept_rows += load_at(entry(table, n, DOWN_BIAS, head), e_rows, E)
            y = product(matrix, receive_vector(inner, epoch, failed, F, BF)) + kept_rows
            send(out, e_rows, e_rows < E, y, epoch)
    if HEAD & PHASES:
        v_rows = program * V_ROWS + tl.arange(0, V_ROWS)
        k = tl.arange(0, BE)
        matrix = load_rows(head, v_rows, V, E, BE)
        bias = load_at(head_bias, v_rows, V)
        if not PRE:
            gain, shift = load_norm(table, LAYERS - 1, head, FEED_FORWARD_GAIN, E, BE, KIND)
        if FINAL:
            last_gain, last_shift = load_at(final_gain, k, E), tl.zeros([BE], tl.float32)
            if FINAL == LAYER:
                last_shift = load_at(final_shift, k, E)
        x = receive_vector(boxes + LAYERS * BOX - E, epoch, failed, E, BE)
        if not PRE:
            x = normalised(x, gain, shift, eps, E, BE, KIND)
        if FINAL:
            x = normalised(x, last_gain, last_shift, final_eps, E, BE, FINAL)
        # A reader that gave up has computed with old values: NaN, which the sampler reports.
        y = tl.where(tl.load(failed, volatile=True) != 0, float("nan"), (product(matrix, x) + bias) * head_scale)
        tl.store(logits + v_rows, y, mask=v_rows < V)
        tl.store(epochs + program, epoch)
        if program == 0:
            tl.store(count, written + 1)
