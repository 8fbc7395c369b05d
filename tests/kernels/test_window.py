"""The window of position scores in shared memory, its PTX executed here one warp after the other."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.kernels.relative_attention import fused

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
T = 64
Registers = dict[str, torch.Tensor]


def bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    pair = torch.stack((low, high), -1).clamp(-65504, 65504).half()
    return pair.view(torch.int32).squeeze(-1).long() & 0xFFFFFFFF


def halves(word: torch.Tensor) -> torch.Tensor:
    return (word & 0xFFFFFFFF).to(torch.int64).unsqueeze(-1).view(torch.int32)[..., :1].view(torch.half)


def run(asm: str, lanes: Registers, memory: torch.Tensor) -> None:
    """Execute the instructions of fused_slide.py on the 32 lanes of a warp. `memory` has one 32-bit word per entry."""

    def value(name: str) -> torch.Tensor:
        return lanes[name] if name in lanes else torch.full((32,), int(name))

    def address(text: str) -> torch.Tensor:
        base, offset = text.strip("[]").split(" + ")
        at = value(base) + int(offset)
        assert (at % 4 == 0).all()
        return at // 4

    def load(to: str, at: str) -> torch.Tensor:
        return memory[address(at)]

    def funnel(_: str, low: str, high: str, by: str) -> torch.Tensor:
        return (((value(high) << 32) | value(low)) >> value(by)) & 0xFFFFFFFF

    compute: dict[str, Callable[..., torch.Tensor]] = {
        "cvt.rn.satfinite.f16x2.f32": lambda _, high, low: bits(value(low), value(high)),
        "cvt.f32.f16": lambda _, half: value(half),
        "ld.shared.b32": load,
        "and.b32": lambda _, a, b: value(a) & value(b),
        "shl.b32": lambda _, a, b: value(a) << value(b),
        "setp.ne.u32": lambda _, a, b: value(a) != value(b),
        "shf.r.wrap.b32": funnel,
        "mov.b32": lambda _, a: value(a),
    }
    for statement in re.split(r"[;\n]+", asm.strip("{}")):
        words = statement.strip()
        if not words or words.startswith((".reg", "bar.warp.sync")):
            continue
        guard, words = re.fullmatch(r"(?:@(\w+) )?(.*)", words).groups()  # type: ignore[union-attr]
        name, rest = words.split(" ", 1)
        operands = [part.strip() for part in re.findall(r"\[[^]]*\]|\{[^}]*\}|[^,]+", rest) if part.strip()]
        if name == "st.shared.b32":
            memory[address(operands[0])] = value(operands[1])
        elif operands[0] == "{low, high}":
            pair = halves(value(operands[1]))
            lanes["low"], lanes["high"] = pair[..., 0].float(), pair[..., 1].float()
        else:
            found = compute[name](*operands)
            lanes[operands[0]] = found if guard is None else torch.where(lanes[guard], found, lanes[operands[0]])


def of_lanes(tile: torch.Tensor, warp: int) -> list[torch.Tensor]:
    """The 32 numbers of each lane of a [64, 64] tensor-core tile on four warps."""
    lane = torch.arange(32)
    rows, columns = 16 * warp + lane // 4, 2 * (lane % 4)
    return [tile[rows + 8 * (k >> 1 & 1), columns + 8 * (k >> 2) + (k & 1)] for k in range(32)]


def size_of(buffer: Any) -> int:
    return int(re.search(r"\[(\d+)\]", buffer.value).group(1))  # type: ignore[union-attr]


@interpreted
@pytest.mark.parametrize("slide", [fused.HALF, fused.STILL])
def test_shifted_scores_come_back_from_shared_memory(slide: int) -> None:
    """Over more tiles than the window has moves: score [ii, jj] of a tile is that of its distance."""
    from longspan.kernels.relative_attention import slide_ptx as ptx
    from tests.kernels.window_kernel import addresses_kernel

    tables = torch.zeros(3, T, T, dtype=torch.int32)
    addresses_kernel[(1,)](tables, T, slide)
    older, newer, keys = tables.long()
    still = slide == fused.STILL
    back, buffer = (ptx.MOVE_BACK_STILL, ptx.STILL_BUFFER) if still else (ptx.MOVE_BACK, ptx.HALF_BUFFER)
    steps = ptx.steps_of(slide)
    tiles = steps + 2
    scores = torch.randn(T, (tiles + 1) * T).half().float()  # by query and distance, the farthest first
    memory = torch.full((size_of(buffer) // 4,), -1)

    def execute(asm: str, warp: int, values: torch.Tensor, addresses: torch.Tensor) -> Registers:
        lanes = {f"${32 + k}": number for k, number in enumerate(of_lanes(values, warp))}
        lanes["$64"] = of_lanes(addresses, warp)[0]
        run(asm, lanes, memory)
        return lanes

    wanted = [torch.stack([row[n * T + T - 1 - ii :][:T] for ii, row in enumerate(scores)]) for n in range(tiles)]
    for warp in (2, 0, 3, 1):  # warps do not wait for each other
        execute(ptx.PUT_SCORES.value, warp, scores[:, :T], older)
        for n in range(tiles):
            moved = 2 * T * (n % steps)
            execute(ptx.PUT_SCORES.value, warp, scores[:, (n + 1) * T :][:, :T], newer + moved)
            lanes = execute(ptx.TAKE_SCORES.value, warp, scores[:, :T], keys + moved)
            got = torch.stack([lanes[f"${k}"] for k in range(32)])
            assert torch.equal(got, torch.stack(of_lanes(wanted[n], warp)))
            if n % steps == steps - 1:
                execute(back.value, warp, scores[:, :T], older)


def test_windows_end_at_a_multiple_of_1024_bytes() -> None:
    """Triton's own shared memory begins where they end, and its swizzled tensor-core tiles need this alignment."""
    from longspan.kernels.relative_attention import slide_ptx as ptx

    for buffer in (ptx.HALF_BUFFER, ptx.STILL_BUFFER, ptx.BUFFER_64, ptx.TALL_64, ptx.SHORT_64):
        assert size_of(buffer) % 1024 == 0
