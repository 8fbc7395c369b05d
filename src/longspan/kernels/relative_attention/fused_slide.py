"""Shifts a tile of scores between keys and distances, inside a Triton program.

A tile of T queries and T keys, n tiles before the queries' own keys, uses the distances (n+1) T - 1 - t with
t = jj - ii + T - 1 from 0 to 2 T - 2. When n goes down by one, the next tile uses T of the same distances. So a window
of 2 T columns moves along, and each position score is computed once.

Four methods, chosen at compile time by SLIDE:

    GATHER  tl.gather from both halves of the window, in registers; works wherever Triton does, also in its interpreter
    BLOCK   the window is in shared memory, written with one row stride and read with that stride minus one; the
            shared-memory instructions are inline PTX, because Triton's layouts cannot express them
    WARP    the same for tensor-core tiles of 64 by 64 on four warps (Hopper), where each warp owns complete rows: no
            block barrier, and one address per thread for all its numbers
    HALF    the same with 16 bits per number, so that three programs fit on a multiprocessor: position scores in
            float16, saturated, and gradients in bfloat16, the type that the products need
"""

# ruff: noqa: RET505, SIM102 (Triton compiles one branch of a condition; code after a return is compiled too)
# mypy: disable-error-code="no-untyped-def"

import ctypes
from typing import Any

import triton
import triton.language as tl

GATHER = tl.constexpr(0)
BLOCK = tl.constexpr(1)
WARP = tl.constexpr(2)
HALF = tl.constexpr(3)

# Extra columns per row in shared memory, so that eight rows of a tensor-core tile are in different banks.
PAD = tl.constexpr(8)


def raise_shared_limit(_module: Any, function: int, name: str, *_: Any) -> None:
    """Raise the limit of shared memory: Triton requests only what it allocates itself, without this window."""
    if name in ("forward_kernel", "query_kernel", "key_kernel", "stored_kernel"):
        driver, got = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        handle, device = ctypes.c_void_p(function), ctypes.c_int(triton.runtime.driver.active.get_current_device())
        driver.cuDeviceGetAttribute(ctypes.byref(got), 97, device)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        most = got.value
        driver.cuFuncGetAttribute(ctypes.byref(got), 1, handle)  # SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(handle, 8, most - got.value)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(handle, 9, 100)  # PREFERRED_SHARED_MEMORY_CARVEOUT


if hasattr(triton.knobs.runtime, "kernel_load_end_hook"):
    triton.knobs.runtime.kernel_load_end_hook.add(raise_shared_limit)


def _scratch(name: str, floats: int) -> tl.constexpr:
    return tl.constexpr(f"{{ .shared .align 16 .b8 {name}[{4 * floats}]; mov.u32 $0, {name}; }}")


def _steps(slide: int) -> int:
    """Moves of the window before it returns to its beginning; fewer need less shared memory."""
    return 4 if slide == 3 else 6


steps = triton.constexpr_function(_steps)

# A thread holds 32 numbers of a 64 by 64 tensor-core tile on four warps: pairs along a row, in two rows eight apart,
# every eight columns. The instructions below are written once per pair, k being the index of its first number.
_PAIRS = range(0, 32, 2)


def _at(k: int, row: int, size: int = 2) -> int:
    """The offset in bytes of pair k from the first pair, in rows of `row` numbers of `size` bytes."""
    return size * (8 * (k >> 1 & 1) * row + 8 * (k >> 2))


def _asm(*lines: str) -> tl.constexpr:
    return tl.constexpr("\n".join(["{", *lines, "}"]))


def _operands(*kinds: str) -> tl.constexpr:
    return tl.constexpr(",".join(kind for kind in kinds for _ in range(32)))


def _window(T: int, slide: int) -> int:
    return T * (2 * T + PAD.value) + T // 16 * _steps(slide) * T


BUFFER_64, BUFFER_32 = _scratch("slide_buffer", _window(64, 2)), _scratch("slide_buffer", _window(32, 2))
HALF_BUFFER = _scratch("slide_buffer", _window(64, 3) // 2)
TALL_64, TALL_32 = _scratch("slide_tall", 128 * 72), _scratch("slide_tall", 64 * 40)
SHORT_64 = _scratch("slide_short", 64 * 72 // 2)

# Operands of what follows: 32 outputs, 32 values, 32 addresses of which only the first is used.
PUT_WITH, TAKE_WITH = _operands("=r", "f", "r"), _operands("=f", "f", "r")
PUT_136 = _asm(*(f"st.shared.v2.f32 [$64 + {_at(k, 136, 4)}], {{${32 + k}, ${33 + k}}};" for k in _PAIRS))
TAKE_136 = _asm(*(f"ld.shared.v2.f32 {{${k}, ${k + 1}}}, [$64 + {_at(k, 136, 4)}];" for k in _PAIRS))
TAKE_135 = _asm(
    *(f"ld.shared.f32 ${k + e}, [$64 + {_at(k, 135, 4) + 4 * e}];" for k in _PAIRS for e in (0, 1)),
)
TAKE_SHORT = _asm(
    ".reg .b32 x; .reg .b16 low, high;",
    *(
        f"ld.shared.b32 x, [$64 + {_at(k, 72)}]; mov.b32 {{low, high}}, x;"
        f"cvt.f32.f16 ${k}, low; cvt.f32.f16 ${k + 1}, high;"
        for k in _PAIRS
    ),
)
PUT_SCORES = _asm(
    ".reg .b32 x;",
    *(f"cvt.rn.satfinite.f16x2.f32 x, ${33 + k}, ${32 + k}; st.shared.b32 [$64 + {_at(k, 136)}], x;" for k in _PAIRS),
)
# In a row that is shifted by an odd number, a pair is in two words. This is the same for both rows of a thread.
_ODD = ".reg .pred odd; .reg .b32 odd_by; and.b32 odd_by, $64, 2; setp.ne.u32 odd, odd_by, 0;"
TAKE_SCORES = _asm(
    _ODD,
    ".reg .b32 word, bits, x, y; .reg .b16 low, high;",
    "and.b32 word, $64, -4; shl.b32 bits, odd_by, 3; mov.b32 y, 0;",
    *(
        f"ld.shared.b32 x, [word + {_at(k, 135)}]; @odd ld.shared.b32 y, [word + {_at(k, 135) + 4}];"
        f"shf.r.wrap.b32 x, x, y, bits; mov.b32 {{low, high}}, x; cvt.f32.f16 ${k}, low; cvt.f32.f16 ${k + 1}, high;"
        for k in _PAIRS
    ),
)
PUT_GRADS = _asm(
    _ODD,
    ".reg .b32 x; .reg .b16 low, high;",
    *(
        f"cvt.rn.bf16x2.f32 x, ${33 + k}, ${32 + k}; mov.b32 {{low, high}}, x;"
        f"@!odd st.shared.b32 [$64 + {_at(k, 135)}], x;"
        f"@odd st.shared.b16 [$64 + {_at(k, 135)}], low; @odd st.shared.b16 [$64 + {_at(k, 135) + 2}], high;"
        for k in _PAIRS
    ),
)
# 16 outputs of two numbers each.
TAKE_GRADS = _asm(*(f"ld.shared.b32 ${k // 2}, [$48 + {_at(k, 136)}];" for k in _PAIRS))
TAKE_GRADS_WITH = tl.constexpr(",".join(["=r"] * 16 + ["f"] * 32 + ["r"] * 32))
MOVE_BACK = _asm(
    ".reg .b32 x<32>;",
    *(f"ld.shared.b32 x{k}, [$64 + {_at(k, 136) + 2 * 64 * _steps(3)}];" for k in _PAIRS),
    "bar.warp.sync 0xffffffff;",
    *(f"st.shared.b32 [$64 + {_at(k, 136)}], x{k};" for k in _PAIRS),
)


def _put_short() -> tl.constexpr:
    """Stores the half of the older and of the newer block that the tile uses, in the row of its key.

    Operands: 32 outputs, 32 numbers of each block, 32 addresses, 32 sums of row and column; of the last two only the
    first is used.
    """
    lines = [".reg .pred older; .reg .b32 x; .reg .b16 low, high;"]
    for k in range(32):
        row, column = 8 * (k >> 1 & 1), 8 * (k >> 2) + (k & 1)
        offset = 2 * (row * 72 + column * 73)
        lines.append(f"cvt.rn.satfinite.f16x2.f32 x, ${64 + k}, ${32 + k}; mov.b32 {{low, high}}, x;")
        lines.append(f"setp.ge.s32 older, $128, {63 - row - column};")
        lines.append(f"@older st.shared.b16 [$96 + {offset}], low;")
        lines.append(f"@!older st.shared.b16 [$96 + {offset + 2 * 64 * 72}], high;")
    return _asm(*lines)


PUT_SHORT = _put_short()
PUT_SHORT_WITH = _operands("=r", "f", "f", "r", "r")


def _add_rows() -> tl.constexpr:
    """A tensor-core tile added to float32 rows in global memory, four numbers at a time.

    Neighbouring threads exchange pairs: one adds four of eight columns, the other four of the next eight.
    Operands: 32 outputs, 32 values, 32 addresses of which only the first of each row is used.
    """
    lines = [".reg .pred odd; .reg .b32 side; .reg .b64 to0, to2, by; .reg .f32 s<2>, r<2>, x<4>;"]
    lines.append("cvt.u32.u64 side, $64; and.b32 side, side, 8; setp.ne.u32 odd, side, 0; mul.lo.u32 side, side, 3;")
    lines.append("cvt.u64.u32 by, side; add.u64 to0, $64, by; add.u64 to2, $66, by;")
    for k in range(0, 32, 8):
        for row in (0, 2):
            here, there = 32 + k + row, 36 + k + row
            for e in (0, 1):
                lines.append(f"selp.f32 s{e}, ${here + e}, ${there + e}, odd;")
                lines.append(f"shfl.sync.bfly.b32 r{e}, s{e}, 1, 0x1f, 0xffffffff;")
                lines.append(f"selp.f32 x{e}, r{e}, ${here + e}, odd; selp.f32 x{2 + e}, ${there + e}, r{e}, odd;")
            lines.append(f"red.relaxed.gpu.global.add.v4.f32 [to{row} + {8 * k}], {{x0, x1, x2, x3}};")
    return _asm(*lines)


ADD_64 = _add_rows()
ADD_WITH = _operands("=r", "f", "l")


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
    if SLIDE == HALF:
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
    if SLIDE == HALF:
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
    if (SLIDE == WARP) | (SLIDE == HALF):
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
def window_address(base, start: tl.constexpr, STRIDE: tl.constexpr, T: tl.constexpr, SLIDE: tl.constexpr):
    """Addresses of T columns of the window from `start` on, or of the keys if the stride is one less; for every query.

    When the window moves, a row occupies addresses of the next row. Rows of one warp move together, and a gap separates
    the rows of different warps.
    """
    rows = tl.arange(0, T)[:, None]
    places = rows * STRIDE + (rows // 16) * (steps(SLIDE) * T) + tl.arange(0, T)[None, :] + start
    return base + places * (2 if SLIDE == HALF else 4)


@triton.jit
def keep_first(base, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Store the first half of the window of the first tile."""
    if SLIDE != GATHER:
        put(window_address(base, 0, 2 * T + PAD, T, SLIDE), block, SLIDE)


@triton.jit
def keep_block(base, step, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Store the new half of this step's window; returns the address of the window."""
    if SLIDE == GATHER:
        return base
    else:
        at = base + (2 if SLIDE == HALF else 4) * T * (step % steps(SLIDE))
        barrier(SLIDE)
        put(window_address(at, T, 2 * T + PAD, T, SLIDE), block, SLIDE)
        barrier(SLIDE)
        return at


@triton.jit
def carry_back(base, step, like, T: tl.constexpr, SLIDE: tl.constexpr):
    """After the last move, copy the half of the window that the next tile needs back to the beginning.

    Call it only at the end of a loop body, because Triton's pipeliner moves the condition there anyway.
    """
    if SLIDE != GATHER:
        if step % steps(SLIDE) == steps(SLIDE) - 1:
            barrier(SLIDE)
            to = window_address(base, 0, 2 * T + PAD, T, SLIDE)
            if SLIDE == HALF:
                tl.inline_asm_elementwise(MOVE_BACK, PUT_WITH, [like, to], tl.int32, False, 32)
            else:
                carried = take(window_address(base, T * steps(SLIDE), 2 * T + PAD, T, SLIDE), like, SLIDE)
                barrier(SLIDE)
                put(to, carried, SLIDE)


@triton.jit
def slide(at, older, newer, T: tl.constexpr, SLIDE: tl.constexpr):
    """Position scores [query, key] of the tile whose window is at `at`."""
    if SLIDE == GATHER:
        t = tl.arange(0, T)[None, :] - tl.arange(0, T)[:, None] + (T - 1)
        from_older = tl.gather(older, tl.minimum(t, T - 1), 1)
        from_newer = tl.gather(newer, tl.maximum(t - T, 0), 1)
        return tl.where(t < T, from_older, from_newer)
    else:
        return take(window_address(at, T - 1, 2 * T + PAD - 1, T, SLIDE), newer, SLIDE, True)


@triton.jit
def unslide(grads, at, before, T: tl.constexpr, SLIDE: tl.constexpr):
    """Gradients [query, distance] of the first half of the window, which this tile is the last to use.

    Every entry is read by one tile only, so gradients overwrite the scores.
    """
    if SLIDE == GATHER:
        jj = tl.arange(0, T)[None, :] + tl.arange(0, T)[:, None] - (T - 1)
        from_now = tl.gather(grads, tl.maximum(jj, 0), 1)
        from_before = tl.gather(before, tl.minimum(jj + T, T - 1), 1)
        return tl.where(jj >= 0, from_now, from_before)
    else:
        to = window_address(at, T - 1, 2 * T + PAD - 1, T, SLIDE)
        by_distance = window_address(at, 0, 2 * T + PAD, T, SLIDE)
        barrier(SLIDE)
        tl.static_assert(SLIDE != WARP)
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
