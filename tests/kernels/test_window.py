"""The window of position scores in shared memory, its PTX executed here one warp after the other."""

import re
from collections.abc import Callable

import pytest
import torch

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
        base, offset = text.strip("[]").split(" + ")  # "+ -128" is an offset too
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


def of_lanes(tile: torch.Tensor, warp: int, part: int) -> list[torch.Tensor]:
    """The 32 numbers of each lane of a [Q, 64] tensor-core tile on four warps; `part` is a block of 64 rows."""
    lane = torch.arange(32)
    rows, columns = 64 * part + 16 * warp + lane // 4, 2 * (lane % 4)
    return [tile[rows + 8 * (k >> 1 & 1), columns + 8 * (k >> 2) + (k & 1)] for k in range(32)]


@interpreted
@pytest.mark.parametrize("Q", [64, 128])
def test_shifted_scores_come_back_from_shared_memory(Q: int) -> None:
    """Over more tiles than the window has moves: score [ii, jj] of a tile is that of its distance."""
    from longspan.kernels.relative_attention import slide_ptx as ptx
    from tests.kernels.window_kernel import addresses_kernel

    tables = torch.zeros(4, Q, T, dtype=torch.int32)
    addresses_kernel[(1,)](tables, T, Q)
    newest, older, keys, oldest = tables.long()
    wide = Q == 128
    put = ptx.PUT_SCORES_128.value if wide else ptx.PUT_SCORES.value
    take = ptx.TAKE_SCORES_128.value if wide else ptx.TAKE_SCORES.value
    back = ptx.MOVE_BACK_128.value if wide else ptx.MOVE_BACK.value
    buffer = ptx.HALF_BUFFER_128.value if wide else ptx.HALF_BUFFER.value
    steps, blocks = ptx.steps_of(3, Q), Q // T
    tiles = steps + 2
    scores = torch.randn(Q, (tiles + blocks) * T).half().float()  # by query and distance, the farthest first
    memory = torch.full((int(re.search(r"\[(\d+)\]", buffer).group(1)) // 4,), -1)  # type: ignore[union-attr]

    def move_back(warp: int) -> None:
        first = [of_lanes(older, warp, part)[0] for part in range(blocks)]
        run(back, dict(zip(("$128", "$160") if wide else ("$64",), first, strict=True)), memory)

    def each(asm: str, warp: int, values: torch.Tensor, addresses: torch.Tensor) -> list[Registers]:
        found = []
        for part in range(blocks):
            at = of_lanes(addresses, warp, part)[0]
            lanes = {f"${32 + k}": number for k, number in enumerate(of_lanes(values, warp, part))} | {"$64": at}
            run(asm, lanes, memory)
            found.append(lanes)
        return found

    wanted = [torch.stack([row[n * T + Q - 1 - ii :][:T] for ii, row in enumerate(scores)]) for n in range(tiles)]
    for warp in (2, 0, 3, 1):  # warps do not wait for each other
        for age, table in zip(range(blocks, 0, -1), (oldest, older) if wide else (older,), strict=True):
            each(put, warp, scores[:, (blocks - age) * T :][:, :T], table)
        for n in range(tiles):
            moved = 2 * T * (n % steps)
            each(put, warp, scores[:, (n + blocks) * T :][:, :T], newest + moved)
            for part, lanes in enumerate(each(take, warp, scores[:, :T], keys + moved)):
                got = torch.stack([lanes[f"${k}"] for k in range(32)])
                assert torch.equal(got, torch.stack(of_lanes(wanted[n], warp, part)))
            if n % steps == steps - 1:
                move_back(warp)
