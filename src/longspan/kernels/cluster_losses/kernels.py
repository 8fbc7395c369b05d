"""The Triton kernels of cross-entropy without logits in memory.

A block of tokens is given by `order`: token numbers, of which the first `count` belong to the cluster. `count` is on
the device: programs beyond it return at once, so shapes are static.
"""

import triton
import triton.language as tl


@triton.jit
def scores_of(
    hidden, table, bias, rows, here, words, scale, V, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(hidden table^T + bias) scale for tokens `rows` and entries `words` of the table; -inf outside the table."""
    inside, k = words < V, tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, D, BK):
        known = first + k < D
        left = hidden + rows[:, None] * D + first + k[None, :]
        right = table + words[None, :].to(tl.int64) * D + first + k[:, None]
        a = tl.load(left, mask=here[:, None] & known[None, :], other=0.0)
        b = tl.load(right, mask=inside[None, :] & known[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    acc += tl.load(bias + words, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(inside[None, :], acc * scale, float("-inf"))


@triton.jit
def tokens_of(order, count, block, BM: tl.constexpr):
    """Positions of a block in `order`, their token numbers, and which of them belong to the cluster."""
    places = block * BM + tl.arange(0, BM)
    here = places < count
    return places, tl.load(order + places, mask=here, other=0).to(tl.int64), here


@triton.jit
def losses_kernel(
    hidden, table, bias, order, counts, targets, maxima, sums, chosen, scale, N, V, D, SPLIT,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For a block of tokens and a part of the table: the largest score, the sum of exp(score - largest), and the score
    of the target."""
    count = tl.load(counts)
    if tl.program_id(0) * BM >= count:
        return
    places, rows, here = tokens_of(order, count, tl.program_id(0), BM)
    target = tl.load(targets + rows, mask=here, other=-1)
    begin = tl.program_id(1) * SPLIT
    largest = tl.full([BM], float("-inf"), tl.float32)
    total, wanted = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for first in range(begin, tl.minimum(begin + SPLIT, V), BN):
        words = first + tl.arange(0, BN)
        scores = scores_of(hidden, table, bias, rows, here, words, scale, V, D, BM, BN, BK, PRECISION)
        now = tl.maximum(largest, tl.max(scores, 1))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(scores - now[:, None]), 1)
        wanted += tl.sum(tl.where(words[None, :] == target[:, None], scores, 0.0), 1)
        largest = now
    at = tl.program_id(1) * N + places
    tl.store(maxima + at, largest, mask=here)
    tl.store(sums + at, total, mask=here)
    tl.store(chosen + at, wanted, mask=here)


@triton.jit
def slope(scores, lse, grad, target, words, scale):
    """The gradient of the scores before their scaling: (softmax - one-hot) grad scale."""
    p = tl.exp(scores - lse[:, None])
    return (p - tl.where(words[None, :] == target[:, None], 1.0, 0.0)) * (grad * scale)[:, None]


@triton.jit
def hidden_kernel(
    hidden, table, bias, order, counts, targets, lse, grad, out, scale, V, D, SPLIT,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a block of hidden states, from a part of the table and for BD of their units."""
    count = tl.load(counts)
    if tl.program_id(0) * BM >= count:
        return
    _, rows, here = tokens_of(order, count, tl.program_id(0), BM)
    target = tl.load(targets + rows, mask=here, other=-1)
    of, by = tl.load(lse + rows, mask=here, other=0.0), tl.load(grad + rows, mask=here, other=0.0)
    units = tl.program_id(2) * BD + tl.arange(0, BD)
    begin = tl.program_id(1) * SPLIT
    acc = tl.zeros([BM, BD], tl.float32)
    for first in range(begin, tl.minimum(begin + SPLIT, V), BN):
        words = first + tl.arange(0, BN)
        scores = scores_of(hidden, table, bias, rows, here, words, scale, V, D, BM, BN, BK, PRECISION)
        p = slope(scores, of, by, target, words, scale)
        vectors = table + words[:, None].to(tl.int64) * D + units[None, :]
        b = tl.load(vectors, mask=(words < V)[:, None] & (units < D)[None, :], other=0.0)
        acc = tl.dot(p.to(b.dtype), b, acc, input_precision=PRECISION)
    tl.atomic_add(out + rows[:, None] * D + units[None, :], acc, mask=here[:, None] & (units < D)[None, :])


@triton.jit
def table_kernel(
    hidden, table, bias, order, counts, targets, lse, grad, out, out_bias, scale, V, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of the table, for BD of its units, and of its biases: a sum over all tokens."""
    count = tl.load(counts)
    words = tl.program_id(0) * BN + tl.arange(0, BN)
    units = tl.program_id(1) * BD + tl.arange(0, BD)
    acc, total = tl.zeros([BN, BD], tl.float32), tl.zeros([BN], tl.float32)
    for block in range(tl.cdiv(count, BM)):
        _, rows, here = tokens_of(order, count, block, BM)
        target = tl.load(targets + rows, mask=here, other=-1)
        of, by = tl.load(lse + rows, mask=here, other=0.0), tl.load(grad + rows, mask=here, other=0.0)
        scores = scores_of(hidden, table, bias, rows, here, words, scale, V, D, BM, BN, BK, PRECISION)
        p = tl.where(here[:, None], slope(scores, of, by, target, words, scale), 0.0)
        vectors = hidden + rows[:, None] * D + units[None, :]
        a = tl.load(vectors, mask=here[:, None] & (units < D)[None, :], other=0.0)
        acc = tl.dot(tl.trans(p.to(a.dtype)), a, acc, input_precision=PRECISION)
        total += tl.sum(p, 0)
    inside = words < V
    at = out + words[:, None].to(tl.int64) * D + units[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (units < D)[None, :])
    if tl.program_id(1) == 0:
        tl.store(out_bias + words, total.to(out_bias.dtype.element_ty), mask=inside)


@triton.jit
def row_losses_kernel(scores, targets, lse, losses, scale, V, STRIDE, BN: tl.constexpr):
    """Log-sum-exp and loss of one row of scores."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    largest = tl.full([BN], float("-inf"), tl.float32)
    total = tl.zeros([BN], tl.float32)
    for first in range(0, V, BN):
        x = tl.load(scores + row * STRIDE + first + n, mask=first + n < V, other=float("-inf")).to(tl.float32) * scale
        now = tl.maximum(largest, x)
        # A column without any score yet has -inf - -inf.
        total = total * tl.where(largest == now, 1.0, tl.exp(largest - now)) + tl.where(
            x == float("-inf"), 0.0, tl.exp(x - now)
        )
        largest = now
    most = tl.max(largest, 0)
    found = most + tl.log(tl.sum(tl.where(total > 0, total * tl.exp(largest - most), 0.0), 0))
    target = tl.load(targets + row)
    tl.store(lse + row, found)
    tl.store(losses + row, found - tl.load(scores + row * STRIDE + target).to(tl.float32) * scale)


@triton.jit
def row_slopes_kernel(scores, targets, lse, grad, scale, V, STRIDE, BN: tl.constexpr):
    """Replace a block of a row of scores by its gradient, which is zero for the columns from V on."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x = tl.load(scores + row * STRIDE + n, mask=n < V, other=float("-inf")).to(tl.float32) * scale
    p = tl.exp(x - tl.load(lse + row)) - tl.where(n == tl.load(targets + row), 1.0, 0.0)
    made = p * (tl.load(grad + row) * scale)
    tl.store(scores + row * STRIDE + n, made.to(scores.dtype.element_ty), mask=n < STRIDE)
