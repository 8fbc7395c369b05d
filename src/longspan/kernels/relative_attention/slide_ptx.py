"""PTX of the window in shared memory (fused_slide.py): Triton's layouts cannot express the shift."""

import triton.language as tl

# Extra columns per row in shared memory, so that eight rows of a tensor-core tile are in different banks.
PAD = tl.constexpr(8)


def _scratch(name: str, floats: int) -> tl.constexpr:
    return tl.constexpr(f"{{ .shared .align 16 .b8 {name}[{4 * floats}]; mov.u32 $0, {name}; }}")


def steps_of(slide: int) -> int:
    """Places of the window before it returns to its beginning; fewer need less shared memory."""
    return {3: 4, 4: 1}.get(slide, 6)


# A thread holds 32 numbers of a 64 by 64 tensor-core tile on four warps: pairs along a row, in two rows eight apart,
# every eight columns. The instructions below are written once per pair, k being the index of its first number.
_PAIRS = range(0, 32, 2)


def _at(k: int, row: int, size: int = 2) -> int:
    """The offset in bytes of pair k from the first pair, in rows of `row` numbers of `size` bytes."""
    return size * (8 * (k >> 1 & 1) * row + 8 * (k >> 2))


def asm(*lines: str) -> tl.constexpr:
    return tl.constexpr("\n".join(["{", *lines, "}"]))


def _operands(*kinds: str) -> tl.constexpr:
    return tl.constexpr(",".join(kind for kind in kinds for _ in range(32)))


def _window(T: int, slide: int) -> int:
    return T * (2 * T + PAD.value) + T // 16 * (0 if steps_of(slide) == 1 else steps_of(slide) * T)


BUFFER_64, BUFFER_32 = _scratch("slide_buffer", _window(64, 2)), _scratch("slide_buffer", _window(32, 2))
HALF_BUFFER, STILL_BUFFER = (_scratch("slide_buffer", _window(64, slide) // 2) for slide in (3, 4))
TALL_64, TALL_32 = _scratch("slide_tall", 128 * 72), _scratch("slide_tall", 64 * 40)
SHORT_64 = _scratch("slide_short", 64 * 72 // 2)

# Operands of what follows: 32 outputs, 32 values, 32 addresses of which only the first is used.
PUT_WITH, TAKE_WITH = _operands("=r", "f", "r"), _operands("=f", "f", "r")
PUT_136 = asm(*(f"st.shared.v2.f32 [$64 + {_at(k, 136, 4)}], {{${32 + k}, ${33 + k}}};" for k in _PAIRS))
TAKE_136 = asm(*(f"ld.shared.v2.f32 {{${k}, ${k + 1}}}, [$64 + {_at(k, 136, 4)}];" for k in _PAIRS))
TAKE_135 = asm(
    *(f"ld.shared.f32 ${k + e}, [$64 + {_at(k, 135, 4) + 4 * e}];" for k in _PAIRS for e in (0, 1)),
)
TAKE_SHORT = asm(
    ".reg .b32 x; .reg .b16 low, high;",
    *(
        f"ld.shared.b32 x, [$64 + {_at(k, 72)}]; mov.b32 {{low, high}}, x;"
        f"cvt.f32.f16 ${k}, low; cvt.f32.f16 ${k + 1}, high;"
        for k in _PAIRS
    ),
)

PUT_SCORES = asm(
    ".reg .b32 x;",
    *(f"cvt.rn.satfinite.f16x2.f32 x, ${33 + k}, ${32 + k}; st.shared.b32 [$64 + {_at(k, 136)}], x;" for k in _PAIRS),
)
# In a row that is shifted by an odd number, a pair is in two words. This is the same for both rows of a thread.
_ODD = ".reg .pred odd; .reg .b32 odd_by; and.b32 odd_by, $64, 2; setp.ne.u32 odd, odd_by, 0;"

TAKE_SCORES = asm(
    _ODD,
    ".reg .b32 word, bits, x, y; .reg .b16 low, high;",
    "and.b32 word, $64, -4; shl.b32 bits, odd_by, 3; mov.b32 y, 0;",
    *(
        f"ld.shared.b32 x, [word + {_at(k, 135)}]; @odd ld.shared.b32 y, [word + {_at(k, 135) + 4}];"
        "shf.r.wrap.b32 x, x, y, bits; mov.b32 {low, high}, x;"
        f"cvt.f32.f16 ${k}, low; cvt.f32.f16 ${k + 1}, high;"
        for k in _PAIRS
    ),
)


def _move_back(steps: int) -> tl.constexpr:
    """All is loaded before any is stored, as the new place of a row is the old one of another."""
    return asm(
        ".reg .b32 x<32>;",
        *(f"ld.shared.b32 x{k}, [$64 + {_at(k, 136) + 2 * 64 * steps}];" for k in _PAIRS),
        "bar.warp.sync 0xffffffff;",
        *(f"st.shared.b32 [$64 + {_at(k, 136)}], x{k};" for k in _PAIRS),
    )


MOVE_BACK, MOVE_BACK_STILL = _move_back(steps_of(3)), _move_back(steps_of(4))
PUT_GRADS = asm(
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
TAKE_GRADS = asm(*(f"ld.shared.b32 ${k // 2}, [$48 + {_at(k, 136)}];" for k in _PAIRS))
TAKE_GRADS_WITH = tl.constexpr(",".join(["=r"] * 16 + ["f"] * 32 + ["r"] * 32))


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
    return asm(*lines)


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
    return asm(*lines)


ADD_64 = _add_rows()
ADD_WITH = _operands("=r", "f", "l")
