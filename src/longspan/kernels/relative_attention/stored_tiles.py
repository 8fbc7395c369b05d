"""Tiles of [query, key] in global memory, between the kernels of a backward pass that stores them.

A thread holds pairs of neighbouring columns of a tensor-core tile, eight columns apart. Four pairs are stored as one
word of 16 bytes, so columns are permuted within 32. The readers permute the rows of their results instead.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from longspan.kernels.relative_attention.fused_slide import HALF
from longspan.kernels.relative_attention.slide_ptx import asm


def _store(plane: int) -> tl.constexpr:
    """Operands: 32 outputs, 16 words of two numbers, 32 addresses of which only the first is used."""
    lines = []
    for row in (0, 1):  # eight rows apart
        for half in (0, 1):
            words = ", ".join(f"${32 + row + 2 * (4 * half + n)}" for n in range(4))
            lines.append(f"st.global.v4.b32 [$48 + {2 * 64 * 64 * plane + 2 * 64 * 8 * row + 64 * half}], {{{words}}};")
    return asm(*lines)


STORE_0, STORE_1, STORE_2 = _store(0), _store(1), _store(2)
STORE_WITH = tl.constexpr(",".join(["=r"] * 32 + ["r"] * 16 + ["l"] * 32))

# 32 float32 numbers of a thread, four at a time; the threads of a block of 64 columns are 16 bytes apart.


def _four(first: int) -> str:
    return "{" + ", ".join(f"${first + n}" for n in range(4)) + "}"


STORE_SUMS = asm(*(f"st.global.v4.f32 [$64 + {512 * k}], {_four(32 + k)};" for k in range(0, 32, 4)))
STORE_SUMS_WITH = tl.constexpr(",".join(["=r"] * 32 + ["f"] * 32 + ["l"] * 32))
LOAD_SUMS = asm(*(f"ld.global.v4.f32 {_four(k)}, [$64 + {512 * k}];" for k in range(0, 32, 4)))
LOAD_SUMS_WITH = tl.constexpr(",".join(["=f"] * 32 + ["f"] * 32 + ["l"] * 32))


# Thread t prefetches part t of $3 parts of $4 bytes, $2 bytes apart from $1 on.
PREFETCH_PARTS = asm(
    ".reg .pred p; .reg .b32 t; .reg .b64 from; mov.u32 t, %tid.x; setp.lt.s32 p, t, $3;",
    "mad.wide.u32 from, t, $2, $1; @p cp.async.bulk.prefetch.L2.global [from], $4; mov.b32 $0, 0;",
)
MOST_PARTS = tl.constexpr(16)


@triton.jit
def prefetch(base, stride, count, PLANES: tl.constexpr, T: tl.constexpr, SLIDE: tl.constexpr):
    """Start to load `count` times PLANES planes of tiles, `stride` numbers apart, into the L2 cache: all at once, while
    the shared memory of a loop has space for two or three tiles."""
    if SLIDE == HALF:
        some = [base.to(tl.int64), 2 * stride, tl.minimum(count, MOST_PARTS), 2 * PLANES * T * T]
        tl.inline_asm_elementwise(PREFETCH_PARTS, "=r,l,r,r,r", some, tl.int32, False, 1)


@triton.jit
def store_tile(to, tile, PLANE: tl.constexpr, T: tl.constexpr, SLIDE: tl.constexpr):
    """Store a [T, T] tile as number PLANE from `to` on; `column_at` gives the order of its columns."""
    rows = tl.arange(0, T)[:, None]
    columns = tl.arange(0, T)[None, :]
    if SLIDE == HALF:
        # The thread of columns 2 t, 2 t + 1 (modulo 8) stores from byte 16 t on.
        addresses = to.to(tl.int64) + rows * (2 * T) + columns * 8
        if PLANE == 0:
            tl.inline_asm_elementwise(STORE_0, STORE_WITH, [tile, addresses], tl.int32, False, 32)
        elif PLANE == 1:
            tl.inline_asm_elementwise(STORE_1, STORE_WITH, [tile, addresses], tl.int32, False, 32)
        else:
            tl.inline_asm_elementwise(STORE_2, STORE_WITH, [tile, addresses], tl.int32, False, 32)
    else:
        tl.store(to + PLANE * T * T + rows * T + columns, tile)


@triton.jit
def load_tile(base, T: tl.constexpr):
    """A stored [T, T] tile, its columns in stored order."""
    return tl.load(base + tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :])


@triton.jit
def column_at(place, SLIDE: tl.constexpr):
    """The column of a tile that is stored at `place` of a row."""
    if SLIDE == HALF:
        column = place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2
    else:
        column = place
    return column


@triton.jit
def sum_addresses(base, T: tl.constexpr, BD: tl.constexpr):
    """The first address of every thread, at its first number of each 64 columns."""
    rows = tl.arange(0, T)[:, None]
    columns = tl.arange(0, BD)[None, :]
    threads = (rows // 16 * 8 + rows % 8) * 4 + columns % 8 // 2
    return base.to(tl.int64) + threads * 16 + columns // 64 * (4 * T * 64)


@triton.jit
def store_sums(base, sums, T: tl.constexpr, BD: tl.constexpr, SLIDE: tl.constexpr):
    """Store a [T, BD] accumulator without changing its layout; only `load_sums` reads it."""
    if (SLIDE == HALF) & (BD >= 64):
        tl.inline_asm_elementwise(STORE_SUMS, STORE_SUMS_WITH, [sums, sum_addresses(base, T, BD)], tl.int32, False, 32)
    else:
        tl.store(base + tl.arange(0, T)[:, None] * BD + tl.arange(0, BD)[None, :], sums)


@triton.jit
def load_sums(base, like, T: tl.constexpr, BD: tl.constexpr, SLIDE: tl.constexpr):
    """What `store_sums` stored, in the register layout of `like`, which must be an accumulator too."""
    if (SLIDE == HALF) & (BD >= 64):
        # Pure: else Triton keeps copies of it in other layouts.
        sums = tl.inline_asm_elementwise(
            LOAD_SUMS, LOAD_SUMS_WITH, [like, sum_addresses(base, T, BD)], tl.float32, True, 32
        )
    else:
        sums = tl.load(base + tl.arange(0, T)[:, None] * BD + tl.arange(0, BD)[None, :])
    return sums
