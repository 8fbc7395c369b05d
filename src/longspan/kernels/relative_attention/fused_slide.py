"""Shifts a tile of scores between keys and distances, inside a Triton program.

A tile of T queries and T keys, n tiles before the queries' own keys, uses the distances (n+1) T - 1 - t with
t = jj - ii + T - 1 from 0 to 2 T - 2. When n goes down by one, the next tile uses T of the same distances. So a window
of 2 T columns moves along, and each position score is computed once.

Three methods, chosen at compile time by SLIDE:

    GATHER  tl.gather from both halves of the window, in registers; works wherever Triton does, also in its interpreter
    BLOCK   the window is in shared memory, written with one row stride and read with that stride minus one; the
            shared-memory instructions are inline PTX, because Triton's layouts cannot express them
    WARP    the same for tensor-core tiles of 64 by 64 on four warps (Hopper), where each warp owns complete rows: no
            block barrier, and one address per thread for all its numbers
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

# Extra columns per row in shared memory, so that eight rows of a tensor-core tile are in different banks.
PAD = tl.constexpr(8)


def raise_shared_limit(_module: Any, function: int, name: str, *_: Any) -> None:
    """Raise the limit of shared memory: Triton requests only what it allocates itself, without this window."""
    if name in ("forward_kernel", "query_kernel", "key_kernel"):
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


STEPS = tl.constexpr(6)


def _tile(instruction: str, row: int) -> tl.constexpr:
    """`instruction` for the 32 numbers a thread holds of a 64 by 64 tensor-core tile on four warps.

    They are pairs along a row, in two rows eight apart, every eight columns; `row` is the row stride in shared memory.
    Operands: 32 outputs, 32 values, 32 addresses of which only the first is used.
    """
    lines = []
    for k in range(32):
        address = f"[$64 + {4 * (8 * (k >> 1 & 1) * row + 8 * (k >> 2) + (k & 1))}]"
        outs, values = f"{{${k}, ${k + 1}}}", f"{{${32 + k}, ${33 + k}}}"
        if "v2" not in instruction or k % 2 == 0:
            lines.append(instruction.format(out=f"${k}", outs=outs, value=f"${32 + k}", values=values, address=address))
    return tl.constexpr("\n".join(lines))


def _operands(*kinds: str) -> tl.constexpr:
    return tl.constexpr(",".join(kind for kind in kinds for _ in range(32)))


def _window(T: int) -> int:
    return T * (2 * T + PAD.value) + T // 16 * STEPS.value * T


BUFFER_64, BUFFER_32 = _scratch("slide_buffer", _window(64)), _scratch("slide_buffer", _window(32))
TALL_64, TALL_32 = _scratch("slide_tall", 128 * 72), _scratch("slide_tall", 64 * 40)
SHORT_64 = _scratch("slide_short", 64 * 72)
PUT_136 = _tile("st.shared.v2.f32 {address}, {values};", 136)
PUT_135 = _tile("st.shared.f32 {address}, {value};", 135)
TAKE_136 = _tile("ld.shared.v2.f32 {outs}, {address};", 136)
TAKE_135 = _tile("ld.shared.f32 {out}, {address};", 135)
TAKE_72 = _tile("ld.shared.v2.f32 {outs}, {address};", 72)
PUT_WITH, TAKE_WITH = _operands("=r", "f", "r"), _operands("=f", "f", "r")


def _put_short() -> tl.constexpr:
    """Stores the half of the older and of the newer block that the tile uses, in the row of its key.

    Operands: 32 outputs, 32 numbers of each block, 32 addresses, 32 sums of row and column; of the last two only the
    first is used.
    """
    lines = ["{ .reg .pred p;"]
    for k in range(32):
        row, column = 8 * (k >> 1 & 1), 8 * (k >> 2) + (k & 1)
        offset = 4 * (row * 72 + column * (73))
        lines.append(f"setp.ge.s32 p, $128, {63 - row - column};")
        lines.append(f"@p st.shared.f32 [$96 + {offset}], ${32 + k};")
        lines.append(f"@!p st.shared.f32 [$96 + {offset + 4 * 64 * 72}], ${64 + k};")
    return tl.constexpr("\n".join([*lines, "}"]))


PUT_SHORT = _put_short()
PUT_SHORT_WITH = _operands("=r", "f", "f", "r", "r")

# A tensor-core tile added to float32 rows in global memory, two numbers at a time.
# Operands: 32 outputs, 32 values, 32 addresses of which only the first of each row is used.
ADD_64 = tl.constexpr(
    "\n".join(
        f"red.relaxed.gpu.global.add.v2.f32 [${64 + (k & 2)} + {32 * (k >> 2)}], {{${32 + k}, ${33 + k}}};"
        for k in range(0, 32, 2)
    )
)
ADD_WITH = _operands("=r", "f", "l")


@triton.jit
def add_rows(base, rows, values, here, D: tl.constexpr, BD: tl.constexpr, SLIDE: tl.constexpr):
    """base[rows] += values, atomically; rows that are not `here` hold zeros."""
    columns = tl.arange(0, BD)
    pointers = base + rows[:, None] * D + columns[None, :]
    if (SLIDE == WARP) & (D == 64):
        tl.inline_asm_elementwise(ADD_64, ADD_WITH, [values, pointers.to(tl.int64)], tl.int32, False, 32)
    else:
        tl.atomic_add(pointers, values, mask=here[:, None] & (columns < D)[None, :], sem="relaxed")


@triton.jit
def in_registers(tile, number, SLIDE: tl.constexpr):
    """Keeps a left operand out of shared memory, so that more programs fit on a multiprocessor.

    Triton keeps computed operands in registers and loaded ones in shared memory. Multiplying by one makes it a computed
    one, as long as the compiler does not know that it is one: `number` is any finite argument of the kernel.
    """
    if SLIDE == WARP:
        return (tile * (1.0 + 0.0 * number)).to(tile.dtype)
    else:
        return tile


@triton.jit
def put(address, values, STRIDE: tl.constexpr, SLIDE: tl.constexpr):
    """Store values in shared memory; STRIDE is the row stride of `address`."""
    if SLIDE != WARP:
        tl.inline_asm_elementwise(
            "st.shared.f32 [$2], $1; mov.b32 $0, 0;", "=r,f,r", [values, address], tl.int32, False, 1
        )
    elif STRIDE == 136:
        tl.inline_asm_elementwise(PUT_136, PUT_WITH, [values, address], tl.int32, False, 32)
    else:
        tl.static_assert(STRIDE == 135)
        tl.inline_asm_elementwise(PUT_135, PUT_WITH, [values, address], tl.int32, False, 32)


@triton.jit
def take(address, like, STRIDE: tl.constexpr, SLIDE: tl.constexpr):
    """Load from shared memory in the register layout of `like`."""
    if SLIDE != WARP:
        return tl.inline_asm_elementwise("ld.shared.f32 $0, [$2];", "=f,f,r", [like, address], tl.float32, False, 1)
    elif STRIDE == 136:
        return tl.inline_asm_elementwise(TAKE_136, TAKE_WITH, [like, address], tl.float32, False, 32)
    elif STRIDE == 72:
        return tl.inline_asm_elementwise(TAKE_72, TAKE_WITH, [like, address], tl.float32, False, 32)
    else:
        tl.static_assert(STRIDE == 135)
        return tl.inline_asm_elementwise(TAKE_135, TAKE_WITH, [like, address], tl.float32, False, 32)


@triton.jit
def barrier(SLIDE: tl.constexpr):
    """A barrier: writes to shared memory before it are visible after it."""
    if SLIDE == WARP:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)
    elif SLIDE == BLOCK:
        # tl.debug_barrier would work, but Triton does not pipeline a loop that contains it.
        tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def rolling_buffer(T: tl.constexpr, SLIDE: tl.constexpr):
    """Shared memory for the window, one row per query, with space for STEPS moves."""
    if SLIDE == GATHER:
        return 0
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
    elif SLIDE == WARP:
        return tl.inline_asm_elementwise(SHORT_64, "=r", [], tl.int32, False, 1)
    elif T == 64:
        return tl.inline_asm_elementwise(TALL_64, "=r", [], tl.int32, False, 1)
    else:
        tl.static_assert(T == 32)
        return tl.inline_asm_elementwise(TALL_32, "=r", [], tl.int32, False, 1)


@triton.jit
def window_address(base, start: tl.constexpr, STRIDE: tl.constexpr, T: tl.constexpr):
    """Addresses of T columns of the window from `start` on, or of the keys if the stride is one less; for every query.

    When the window moves, a row occupies addresses of the next row. Rows of one warp move together, and a gap separates
    the rows of different warps.
    """
    rows = tl.arange(0, T)[:, None]
    return base + 4 * (rows * STRIDE + (rows // 16) * (STEPS * T) + tl.arange(0, T)[None, :] + start)


@triton.jit
def keep_first(base, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Store the first half of the window of the first tile."""
    if SLIDE != GATHER:
        put(window_address(base, 0, 2 * T + PAD, T), block, 2 * T + PAD, SLIDE)


@triton.jit
def keep_block(base, step, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Store the new half of this step's window; returns the address of the window."""
    if SLIDE == GATHER:
        return base
    else:
        at = base + 4 * T * (step % STEPS)
        barrier(SLIDE)
        put(window_address(at, T, 2 * T + PAD, T), block, 2 * T + PAD, SLIDE)
        barrier(SLIDE)
        return at


@triton.jit
def carry_back(base, step, like, T: tl.constexpr, SLIDE: tl.constexpr):
    """After STEPS tiles, copy the half of the window that the next tile needs back to the beginning.

    Call it only at the end of a loop body, because Triton's pipeliner moves the condition there anyway.
    """
    if SLIDE != GATHER:
        if step % STEPS == STEPS - 1:
            barrier(SLIDE)
            carried = take(window_address(base, T * STEPS, 2 * T + PAD, T), like, 2 * T + PAD, SLIDE)
            barrier(SLIDE)
            put(window_address(base, 0, 2 * T + PAD, T), carried, 2 * T + PAD, SLIDE)


@triton.jit
def slide(at, older, newer, T: tl.constexpr, SLIDE: tl.constexpr):
    """Position scores [query, key] of the tile whose window is at `at`."""
    if SLIDE == GATHER:
        t = tl.arange(0, T)[None, :] - tl.arange(0, T)[:, None] + (T - 1)
        from_older = tl.gather(older, tl.minimum(t, T - 1), 1)
        from_newer = tl.gather(newer, tl.maximum(t - T, 0), 1)
        return tl.where(t < T, from_older, from_newer)
    else:
        return take(window_address(at, T - 1, 2 * T + PAD - 1, T), newer, 2 * T + PAD - 1, SLIDE)


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
        barrier(SLIDE)
        put(window_address(at, T - 1, 2 * T + PAD - 1, T), grads, 2 * T + PAD - 1, SLIDE)
        barrier(SLIDE)
        return take(window_address(at, 0, 2 * T + PAD, T), grads, 2 * T + PAD, SLIDE)


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
    elif SLIDE == WARP:
        barrier(BLOCK)
        total = rows + columns
        address = base + 4 * ((total - (T - 1)) * (T + PAD) + columns)
        tl.inline_asm_elementwise(PUT_SHORT, PUT_SHORT_WITH, [older, newer, address, total], tl.int32, False, 32)
        barrier(BLOCK)
        return take(base + 4 * (rows * (T + PAD) + columns), newer, T + PAD, SLIDE)
    else:
        barrier(BLOCK)
        put(base + 4 * (rows * (T + PAD) + columns), older, T + PAD, SLIDE)
        put(base + 4 * ((rows + T) * (T + PAD) + columns), newer, T + PAD, SLIDE)
        barrier(BLOCK)
        return take(base + 4 * (t * (T + PAD) + columns), newer, T + PAD, SLIDE)
