"""Shifts a tile of scores between keys and distances, inside a Triton program.

A tile of T queries and T keys, n tiles before the queries' own keys, uses the distances (n+1) T - 1 - t with
t = jj - ii + T - 1 from 0 to 2 T - 2. When n goes down by one, the next tile uses T of the same distances. So a window
of 2 T columns moves along, and each position score is computed once.

Five methods, chosen at compile time by SLIDE:

    GATHER  tl.gather from both halves of the window, in registers; works wherever Triton does, also in its interpreter
    BLOCK   the window is in shared memory, written with one row stride and read with that stride minus one; the
            shared-memory instructions are inline PTX, because Triton's layouts cannot express them
    WARP    the same for tensor-core tiles of 64 by 64 on four warps (Hopper), where each warp owns complete rows: no
            block barrier, and one address per thread for all its numbers
    HALF    the same with 16 bits per number, so that three programs fit on a multiprocessor: position scores in
            float16, saturated, and gradients in bfloat16, the type that the products need
    STILL   HALF without moves, in the forward pass: half of the window is copied after every tile. The window has 17
            KB instead of 19, so that with heads of 128 and two stages two programs fit on a multiprocessor
"""

# ruff: noqa: RET505, SIM102 (Triton compiles one branch of a condition; code after a return is compiled too)
# mypy: disable-error-code="no-untyped-def"

import ctypes
from typing import Any

import triton
import triton.language as tl

from longspan.kernels.relative_attention.slide_ptx import (
    ADD_64,
    ADD_WITH,
    BUFFER_32,
    BUFFER_64,
    HALF_BUFFER,
    MOVE_BACK,
    MOVE_BACK_STILL,
    PAD,
    PUT_136,
    PUT_GRADS,
    PUT_SCORES,
    PUT_SHORT,
    PUT_SHORT_WITH,
    PUT_WITH,
    SHORT_64,
    STILL_BUFFER,
    TAKE_135,
    TAKE_136,
    TAKE_GRADS,
    TAKE_GRADS_WITH,
    TAKE_SCORES,
    TAKE_SHORT,
    TAKE_WITH,
    TALL_32,
    TALL_64,
    steps_of,
)

GATHER = tl.constexpr(0)
BLOCK = tl.constexpr(1)
WARP = tl.constexpr(2)
HALF = tl.constexpr(3)
STILL = tl.constexpr(4)


WINDOWED = {"forward_kernel", "query_kernel", "key_kernel", "stored_kernel"}  # kernels with the window


def raise_shared_limit(_module: Any, function: int, name: str, *_: Any) -> None:
    """Raise the limit of shared memory: Triton requests only what it allocates itself, without this window."""
    if name in WINDOWED:
        driver, got = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        handle, device = ctypes.c_void_p(function), ctypes.c_int(triton.runtime.driver.active.get_current_device())
        driver.cuDeviceGetAttribute(ctypes.byref(got), 97, device)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        most = got.value
        driver.cuFuncGetAttribute(ctypes.byref(got), 1, handle)  # SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(handle, 8, most - got.value)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(handle, 9, 100)  # PREFERRED_SHARED_MEMORY_CARVEOUT


if hasattr(triton.knobs.runtime, "kernel_load_end_hook"):
    triton.knobs.runtime.kernel_load_end_hook.add(raise_shared_limit)

steps = triton.constexpr_function(steps_of)


@triton.jit
def add_rows(base, rows, values, here, D: tl.constexpr, BD: tl.constexpr, SLIDE: tl.constexpr):
    """base[rows] += values, atomically; rows that are not `here` hold zeros."""
    columns = tl.arange(0, BD)
    pointers = base + rows[:, None] * D + columns[None, :]
    if (SLIDE == HALF) & (D == 64):
        tl.inline_asm_elementwise(ADD_64, ADD_WITH, [values, pointers.to(tl.int64)], tl.int32, False, 32)
    else:
        tl.atomic_add(pointers, values, mask=here[:, None] & (columns < D)[None, :], sem="relaxed")


@triton.jit
def in_registers(tile, number, SLIDE: tl.constexpr):
    """Keeps a left operand out of shared memory, so that more programs fit on a multiprocessor.

    Triton keeps computed operands in registers and loaded ones in shared memory. Multiplying by one makes it a computed
    one, as long as the compiler does not know that it is one: `number` is any finite argument of the kernel.
    """
    if SLIDE == HALF:
        return (tile * (1.0 + 0.0 * number)).to(tile.dtype)
    else:
        return tile


@triton.jit
def put(address, values, SLIDE: tl.constexpr):
    """Store values in the window."""
    if SLIDE >= HALF:
        tl.inline_asm_elementwise(PUT_SCORES, PUT_WITH, [values, address], tl.int32, False, 32)
    elif SLIDE == WARP:
        tl.inline_asm_elementwise(PUT_136, PUT_WITH, [values, address], tl.int32, False, 32)
    else:
        tl.inline_asm_elementwise(
            "st.shared.f32 [$2], $1; mov.b32 $0, 0;", "=r,f,r", [values, address], tl.int32, False, 1
        )


@triton.jit
def take(address, like, SLIDE: tl.constexpr, SHIFTED: tl.constexpr = False):
    """Load numbers of the window, in the register layout of `like`; SHIFTED is by key instead of by distance."""
    if SLIDE >= HALF:
        tl.static_assert(SHIFTED)
        return tl.inline_asm_elementwise(TAKE_SCORES, TAKE_WITH, [like, address], tl.float32, False, 32)
    elif (SLIDE == WARP) & SHIFTED:
        return tl.inline_asm_elementwise(TAKE_135, TAKE_WITH, [like, address], tl.float32, False, 32)
    elif SLIDE == WARP:
        return tl.inline_asm_elementwise(TAKE_136, TAKE_WITH, [like, address], tl.float32, False, 32)
    else:
        return tl.inline_asm_elementwise("ld.shared.f32 $0, [$2];", "=f,f,r", [like, address], tl.float32, False, 1)


@triton.jit
def barrier(SLIDE: tl.constexpr):
    """A barrier: writes to shared memory before it are visible after it."""
    if SLIDE >= WARP:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)
    elif SLIDE == BLOCK:
        # tl.debug_barrier would work, but Triton does not pipeline a loop that contains it.
        tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def rolling_buffer(T: tl.constexpr, SLIDE: tl.constexpr):
    """Shared memory for the window, one row per query, with space for STEPS moves."""
    if SLIDE == GATHER:
        return 0
    elif SLIDE == HALF:
        return tl.inline_asm_elementwise(HALF_BUFFER, "=r", [], tl.int32, False, 1)
    elif SLIDE == STILL:
        return tl.inline_asm_elementwise(STILL_BUFFER, "=r", [], tl.int32, False, 1)
    elif T == 64:
        return tl.inline_asm_elementwise(BUFFER_64, "=r", [], tl.int32, False, 1)
    else:
        tl.static_assert(T == 32)
        return tl.inline_asm_elementwise(BUFFER_32, "=r", [], tl.int32, False, 1)


@triton.jit
def tall(T: tl.constexpr, SLIDE: tl.constexpr):
    """Shared memory for two blocks of scores, one row per distance."""
    if SLIDE == GATHER:
        return 0
    elif SLIDE == HALF:
        return tl.inline_asm_elementwise(SHORT_64, "=r", [], tl.int32, False, 1)
    elif T == 64:
        return tl.inline_asm_elementwise(TALL_64, "=r", [], tl.int32, False, 1)
    else:
        tl.static_assert(T == 32)
        return tl.inline_asm_elementwise(TALL_32, "=r", [], tl.int32, False, 1)


@triton.jit
def row_address(at, STRIDE: tl.constexpr, T: tl.constexpr, SLIDE: tl.constexpr):
    """Addresses of the first T columns of the window's rows, or with one less of stride of a diagonal.

    When the window moves, a row occupies addresses of the next row. Rows of one warp move together, and a gap separates
    the rows of different warps.
    """
    rows = tl.arange(0, T)[:, None]
    GAP: tl.constexpr = 0 if SLIDE == STILL else steps(SLIDE) * T
    places = rows * STRIDE + (rows // 16) * GAP + tl.arange(0, T)[None, :]
    return at + places * (2 if SLIDE >= HALF else 4)


@triton.jit
def window_address(at, NEWER: tl.constexpr, T: tl.constexpr, SLIDE: tl.constexpr):
    """Addresses of one half of the window, T distances: the older half or, if NEWER is 1, the newer one."""
    return row_address(at, 2 * T + PAD, T, SLIDE) + NEWER * T * (2 if SLIDE >= HALF else 4)


@triton.jit
def key_address(at, T: tl.constexpr, SLIDE: tl.constexpr):
    """Addresses of the position scores of a tile's keys: the row stride is one less."""
    return row_address(at, 2 * T + PAD - 1, T, SLIDE) + (T - 1) * (2 if SLIDE >= HALF else 4)


@triton.jit
def keep_first(base, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Store the older half of the window of the first tile."""
    if SLIDE != GATHER:
        put(window_address(base, 0, T, SLIDE), block, SLIDE)


@triton.jit
def moved(base, step, T: tl.constexpr, SLIDE: tl.constexpr):
    """The address of the window of this step."""
    return base + (2 if SLIDE >= HALF else 4) * T * (step % steps(SLIDE))


@triton.jit
def keep_block(base, step, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Store the newer half of this step's window."""
    if SLIDE != GATHER:
        barrier(SLIDE)
        put(window_address(moved(base, step, T, SLIDE), 1, T, SLIDE), block, SLIDE)
        barrier(SLIDE)


@triton.jit
def carry_back(base, step, like, T: tl.constexpr, SLIDE: tl.constexpr):
    """After the last move, copy the half of the window that the next tile needs back to the beginning.

    Call it only at the end of a loop body, because Triton's pipeliner moves the condition there anyway.
    """
    if SLIDE != GATHER:
        if step % steps(SLIDE) == steps(SLIDE) - 1:
            barrier(SLIDE)
            to = window_address(base, 0, T, SLIDE)
            if SLIDE == HALF:
                tl.inline_asm_elementwise(MOVE_BACK, PUT_WITH, [like, to], tl.int32, False, 32)
            elif SLIDE == STILL:
                tl.inline_asm_elementwise(MOVE_BACK_STILL, PUT_WITH, [like, to], tl.int32, False, 32)
            else:
                carried = take(to + 4 * T * steps(SLIDE), like, SLIDE)
                barrier(SLIDE)
                put(to, carried, SLIDE)


@triton.jit
def slide(base, step, older, newer, T: tl.constexpr, SLIDE: tl.constexpr):
    """Position scores [query, key] of this step's tile."""
    if SLIDE == GATHER:
        t = tl.arange(0, T)[None, :] - tl.arange(0, T)[:, None] + (T - 1)
        from_older = tl.gather(older, tl.minimum(t, T - 1), 1)
        from_newer = tl.gather(newer, tl.maximum(t - T, 0), 1)
        return tl.where(t < T, from_older, from_newer)
    else:
        return take(key_address(moved(base, step, T, SLIDE), T, SLIDE), newer, SLIDE, True)


@triton.jit
def unslide(grads, base, step, before, T: tl.constexpr, SLIDE: tl.constexpr):
    """Gradients [query, distance] of the first half of the window, which this tile is the last to use.

    Every entry is read by one tile only, so gradients overwrite the scores.
    """
    if SLIDE == GATHER:
        jj = tl.arange(0, T)[None, :] + tl.arange(0, T)[:, None] - (T - 1)
        from_now = tl.gather(grads, tl.maximum(jj, 0), 1)
        from_before = tl.gather(before, tl.minimum(jj + T, T - 1), 1)
        return tl.where(jj >= 0, from_now, from_before)
    else:
        at = moved(base, step, T, SLIDE)
        to = key_address(at, T, SLIDE)
        by_distance = window_address(at, 0, T, SLIDE)
        barrier(SLIDE)
        tl.static_assert((SLIDE == BLOCK) | (SLIDE == HALF))
        if SLIDE == HALF:
            tl.inline_asm_elementwise(PUT_GRADS, PUT_WITH, [grads, to], tl.int32, False, 32)
            barrier(SLIDE)
            return tl.inline_asm_elementwise(TAKE_GRADS, TAKE_GRADS_WITH, [grads, by_distance], tl.bfloat16, False, 32)
        else:
            put(to, grads, SLIDE)
            barrier(SLIDE)
            return take(by_distance, grads, SLIDE)


@triton.jit
def slide_tall(base, older, newer, T: tl.constexpr, SLIDE: tl.constexpr):
    """The same as `slide` with the axes exchanged: from blocks [distance, query] to [key, query]."""
    rows = tl.arange(0, T)[:, None]
    columns = tl.arange(0, T)[None, :]
    t = rows - columns + (T - 1)
    if SLIDE == GATHER:
        from_older = tl.gather(older, tl.minimum(t, T - 1), 0)
        from_newer = tl.gather(newer, tl.maximum(t - T, 0), 0)
        return tl.where(t < T, from_older, from_newer)
    elif SLIDE == HALF:
        barrier(BLOCK)
        total = rows + columns
        address = base + 2 * ((total - (T - 1)) * (T + PAD) + columns)
        tl.inline_asm_elementwise(PUT_SHORT, PUT_SHORT_WITH, [older, newer, address, total], tl.int32, False, 32)
        barrier(BLOCK)
        address = base + 2 * (rows * (T + PAD) + columns)
        return tl.inline_asm_elementwise(TAKE_SHORT, TAKE_WITH, [newer, address], tl.float32, False, 32)
    else:
        barrier(BLOCK)
        put(base + 4 * (rows * (T + PAD) + columns), older, SLIDE)
        put(base + 4 * ((rows + T) * (T + PAD) + columns), newer, SLIDE)
        barrier(BLOCK)
        return take(base + 4 * (t * (T + PAD) + columns), newer, SLIDE)
