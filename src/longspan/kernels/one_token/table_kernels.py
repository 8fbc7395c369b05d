"""The tensors of a layer by their addresses, and prefetches of what a program will read."""

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


@triton.jit
def entry(table, n, which: tl.constexpr, like):
    """The address of a tensor of layer n, as a pointer to the model's dtype."""
    address = tl.load(table + n * ENTRIES + which)
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit
def prefetch(address, inside):
    """Start to load sectors of 32 bytes into the L2 cache."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [address.to(tl.int64), inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_rows(matrix, first, N, K: tl.constexpr, ROWS: tl.constexpr):
    """The rows from `first` on."""
    SECTOR: tl.constexpr = 256 // matrix.dtype.element_ty.primitive_bitwidth
    SECTORS: tl.constexpr = triton.next_power_of_2((ROWS * K + SECTOR - 1) // SECTOR)
    at = tl.arange(0, SECTORS) * SECTOR
    prefetch(matrix + first * K + at, (at < ROWS * K) & (first * K + at < N * K))


@triton.jit
def prefetch_vectors(table, n, like, E: tl.constexpr, KIND: tl.constexpr):
    """The norms of a layer."""
    prefetch_rows(entry(table, n, ATTENTION_GAIN, like), 0, 1, E, 1)
    prefetch_rows(entry(table, n, FEED_FORWARD_GAIN, like), 0, 1, E, 1)
    if KIND == LAYER:
        prefetch_rows(entry(table, n, ATTENTION_SHIFT, like), 0, 1, E, 1)
        prefetch_rows(entry(table, n, FEED_FORWARD_SHIFT, like), 0, 1, E, 1)


@triton.jit
def prefetch_slots(
    table, n, like, written, S, C, chunk, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """The keys, values and position keys that this program reads first."""
    SECTOR: tl.constexpr = 256 // like.dtype.element_ty.primitive_bitwidth
    program = tl.program_id(0)
    h, split = program // SPLITS, program % SPLITS
    s = split * chunk + tl.arange(0, SLOTS)
    away = (written % S).to(tl.int32) - s
    away = tl.where(away < 0, away + S, away)
    inside = (h < H) & (s < tl.minimum(split * chunk + chunk, S)) & (away < tl.minimum(written + 1, S))
    far = h * C + C - 1 - tl.minimum(away, C - 1)
    part = tl.arange(0, triton.next_power_of_2((D + SECTOR - 1) // SECTOR))[None, :] * SECTOR
    inside = inside[:, None] & (part < D)
    prefetch(entry(table, n, KEYS, like) + ((h * S + s) * D)[:, None] + part, inside)
    prefetch(entry(table, n, VALUES, like) + ((h * S + s) * D)[:, None] + part, inside)
    prefetch(entry(table, n, DISTANCE, like) + (far * D)[:, None] + part, inside)
