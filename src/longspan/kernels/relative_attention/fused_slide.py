"""Sliding a tile of scores between keys and distances, inside a Triton program.

A tile of T queries and T keys, the keys ending n tiles before the queries' own, meets the distances
(n+1) T - 1 - t with t = jj - ii + T - 1 from 0 to 2 T - 2. Walking n downwards, towards the queries, the next tile
meets the same distances but T: a window of 2 T columns moves along, and each position score is computed once.

Three ways to do it, chosen at compile time by SLIDE:

    GATHER  tl.gather from both halves of the window, held in registers; runs anywhere Triton does, its interpreter
            included
    BLOCK   the window lies in shared memory, written with one row stride and read with that stride less one; the
            shared-memory instructions are inline PTX, which Triton's own layouts cannot say
    WARP    the same for tensor-core tiles of 64 by 64 on four warps (Hopper), where each warp owns whole rows: no
            block barrier, and one address per thread for all its numbers
"""

# ruff: noqa: RET505, SIM102 (Triton compiles one branch of a condition; what follows a return is compiled too)
# mypy: disable-error-code="no-untyped-def"

import ctypes
from typing import Any

import triton
import triton.language as tl

GATHER = tl.constexpr(0)
BLOCK = tl.constexpr(1)
WARP = tl.constexpr(2)

# Extra columns of a row in shared memory, so that eight rows of a tensor-core tile fall on different banks.
PAD = tl.constexpr(8)


def raise_shared_limit(_module: Any, function: int, name: str, *_: Any) -> None:
    """Triton asks the driver for more than 48 KB by what it allocates itself; the ring comes on top of that."""
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


def _room(name: str, floats: int) -> tl.constexpr:
    return tl.constexpr(f"{{ .shared .align 16 .b8 {name}[{4 * floats}]; mov.u32 $0, {name}; }}")


STEPS = tl.constexpr(6)


def _tile(instruction: str, row: int) -> tl.constexpr:
    """`instruction` for the 32 numbers a thread holds of a 64 by 64 tensor-core tile on four warps.

    They lie in pairs along a row, two rows eight apart, every eight columns; `row` is the row stride in shared memory.
    Operands: 32 outputs, 32 values, 32 addresses of which the first says enough.
    """
    lines = []
    for k in range(32):
        place = f"[$64 + {4 * (8 * (k >> 1 & 1) * row + 8 * (k >> 2) + (k & 1))}]"
        outs, values = f"{{${k}, ${k + 1}}}", f"{{${32 + k}, ${33 + k}}}"
        if "v2" not in instruction or k % 2 == 0:
            lines.append(instruction.format(out=f"${k}", outs=outs, value=f"${32 + k}", values=values, place=place))
    return tl.constexpr("\n".join(lines))


def _operands(*kinds: str) -> tl.constexpr:
    return tl.constexpr(",".join(kind for kind in kinds for _ in range(32)))


def _window(T: int) -> int:
    return T * (2 * T + PAD.value) + T // 16 * STEPS.value * T


RING_64, RING_32 = _room("slide_ring", _window(64)), _room("slide_ring", _window(32))
TALL_64, TALL_32 = _room("slide_tall", 128 * 72), _room("slide_tall", 64 * 40)
SHORT_64 = _room("slide_short", 64 * 72)
PUT_136 = _tile("st.shared.v2.f32 {place}, {values};", 136)
PUT_135 = _tile("st.shared.f32 {place}, {value};", 135)
TAKE_136 = _tile("ld.shared.v2.f32 {outs}, {place};", 136)
TAKE_135 = _tile("ld.shared.f32 {out}, {place};", 135)
TAKE_72 = _tile("ld.shared.v2.f32 {outs}, {place};", 72)
PUT_WITH, TAKE_WITH = _operands("=r", "f", "r"), _operands("=f", "f", "r")


def _put_short() -> tl.constexpr:
    """Of the older and the newer block, the half of each that the tile meets, at its key's row.

    Operands: 32 outputs, 32 numbers of each block, 32 addresses, 32 sums of row and column; of the last two the first.
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
# Operands: 32 outputs, 32 values, 32 addresses of which the first of each row says enough.
ADD_64 = tl.constexpr(
    "\n".join(
        f"red.relaxed.gpu.global.add.v2.f32 [${64 + (k & 2)} + {32 * (k >> 2)}], {{${32 + k}, ${33 + k}}};"
        for k in range(0, 32, 2)
    )
)
ADD_WITH = _operands("=r", "f", "l")


@triton.jit
def add_rows(base, rows, values, here, D: tl.constexpr, BD: tl.constexpr, SLIDE: tl.constexpr):
    """base[rows] += values, whoever else adds there; rows not `here` hold zeros."""
    columns = tl.arange(0, BD)
    places = base + rows[:, None] * D + columns[None, :]
    if (SLIDE == WARP) & (D == 64):
        tl.inline_asm_elementwise(ADD_64, ADD_WITH, [values, places.to(tl.int64)], tl.int32, False, 32)
    else:
        tl.atomic_add(places, values, mask=here[:, None] & (columns < D)[None, :], sem="relaxed")


@triton.jit
def in_registers(tile, number, SLIDE: tl.constexpr):
    """A left operand that should not take shared memory: programs share a multiprocessor only if all fit.

    One that was computed is held in registers, one that was loaded is not. Times one makes the difference, as long as
    the compiler does not see that it is one: `number` is any finite argument of the kernel.
    """
    if SLIDE == WARP:
        return (tile * (1.0 + 0.0 * number)).to(tile.dtype)
    else:
        return tile


@triton.jit
def put(address, values, STRIDE: tl.constexpr, SLIDE: tl.constexpr):
    """values to shared memory; STRIDE is that of the rows of `address`."""
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
    """What lies at address, in the register layout of `like`."""
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
def meet(SLIDE: tl.constexpr):
    """Shared memory written before is there for all who read it after."""
    if SLIDE == WARP:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)
    elif SLIDE == BLOCK:
        # tl.debug_barrier would do, but a loop that holds one is not pipelined.
        tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def ring(T: tl.constexpr, SLIDE: tl.constexpr):
    """Room for the window, one row per query, and for STEPS tiles to move along."""
    if SLIDE == GATHER:
        return 0
    elif T == 64:
        return tl.inline_asm_elementwise(RING_64, "=r", [], tl.int32, False, 1)
    else:
        tl.static_assert(T == 32)
        return tl.inline_asm_elementwise(RING_32, "=r", [], tl.int32, False, 1)


@triton.jit
def tall(T: tl.constexpr, SLIDE: tl.constexpr):
    """Room for two blocks of scores with one row per distance."""
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
    """T columns of the window from `start` on or, with the stride less one, of the keys; for every query.

    As the window moves on a row comes to lie where the next one was. Rows of one warp are in step; a gap keeps warps
    apart.
    """
    rows = tl.arange(0, T)[:, None]
    return base + 4 * (rows * STRIDE + (rows // 16) * (STEPS * T) + tl.arange(0, T)[None, :] + start)


@triton.jit
def keep_first(base, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Put the first half of the first tile's window."""
    if SLIDE != GATHER:
        put(window_address(base, 0, 2 * T + PAD, T), block, 2 * T + PAD, SLIDE)


@triton.jit
def keep_block(base, step, block, T: tl.constexpr, SLIDE: tl.constexpr):
    """Put the half of this step's window that is new, and say where the window now lies."""
    if SLIDE == GATHER:
        return base
    else:
        at = base + 4 * T * (step % STEPS)
        meet(SLIDE)
        put(window_address(at, T, 2 * T + PAD, T), block, 2 * T + PAD, SLIDE)
        meet(SLIDE)
        return at


@triton.jit
def carry_back(base, step, like, T: tl.constexpr, SLIDE: tl.constexpr):
    """After STEPS tiles, begin again with the half of the window that the next tile needs.

    Only as the last words of a loop's body: that is where Triton's pipeliner moves a condition, wherever it stood.
    """
    if SLIDE != GATHER:
        if step % STEPS == STEPS - 1:
            meet(SLIDE)
            carried = take(window_address(base, T * STEPS, 2 * T + PAD, T), like, 2 * T + PAD, SLIDE)
            meet(SLIDE)
            put(window_address(base, 0, 2 * T + PAD, T), carried, 2 * T + PAD, SLIDE)


@triton.jit
def slide(at, older, newer, T: tl.constexpr, SLIDE: tl.constexpr):
    """Position scores [query, key] of the tile whose window lies at `at`."""
    if SLIDE == GATHER:
        t = tl.arange(0, T)[None, :] - tl.arange(0, T)[:, None] + (T - 1)
        from_older = tl.gather(older, tl.minimum(t, T - 1), 1)
        from_newer = tl.gather(newer, tl.maximum(t - T, 0), 1)
        return tl.where(t < T, from_older, from_newer)
    else:
        return take(window_address(at, T - 1, 2 * T + PAD - 1, T), newer, 2 * T + PAD - 1, SLIDE)


@triton.jit
def unslide(grads, at, before, T: tl.constexpr, SLIDE: tl.constexpr):
    """The window's first half [query, distance] of gradients: this tile is the last that meets them.

    Each place is read by one tile alone, so gradients take the place of the scores they came from.
    """
    if SLIDE == GATHER:
        jj = tl.arange(0, T)[None, :] + tl.arange(0, T)[:, None] - (T - 1)
        from_now = tl.gather(grads, tl.maximum(jj, 0), 1)
        from_before = tl.gather(before, tl.minimum(jj + T, T - 1), 1)
        return tl.where(jj >= 0, from_now, from_before)
    else:
        meet(SLIDE)
        put(window_address(at, T - 1, 2 * T + PAD - 1, T), grads, 2 * T + PAD - 1, SLIDE)
        meet(SLIDE)
        return take(window_address(at, 0, 2 * T + PAD, T), grads, 2 * T + PAD, SLIDE)


@triton.jit
def slide_tall(base, older, newer, T: tl.constexpr, SLIDE: tl.constexpr):
    """slide with keys and distances down the rows: blocks [distance, query] make [key, query]."""
    rows = tl.arange(0, T)[:, None]
    columns = tl.arange(0, T)[None, :]
    t = rows - columns + (T - 1)
    if SLIDE == GATHER:
        from_older = tl.gather(older, tl.minimum(t, T - 1), 0)
        from_newer = tl.gather(newer, tl.maximum(t - T, 0), 0)
        return tl.where(t < T, from_older, from_newer)
    elif SLIDE == WARP:
        meet(BLOCK)
        total = rows + columns
        address = base + 4 * ((total - (T - 1)) * (T + PAD) + columns)
        tl.inline_asm_elementwise(PUT_SHORT, PUT_SHORT_WITH, [older, newer, address, total], tl.int32, False, 32)
        meet(BLOCK)
        return take(base + 4 * (rows * (T + PAD) + columns), newer, T + PAD, SLIDE)
    else:
        meet(BLOCK)
        put(base + 4 * (rows * (T + PAD) + columns), older, T + PAD, SLIDE)
        put(base + 4 * ((rows + T) * (T + PAD) + columns), newer, T + PAD, SLIDE)
        meet(BLOCK)
        return take(base + 4 * (t * (T + PAD) + columns), newer, T + PAD, SLIDE)
