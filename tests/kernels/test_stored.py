"""The backward pass with stored tiles against the reference in float64 and against the kernels that store nothing.

Buffers are filled with NaN, so that a test fails if something is read that was not written.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan.cuda_graphs import capture, warm_up
from longspan.kernels.relative_attention import fused, reference, stored
from longspan.kernels.relative_attention.stored import Plan

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def draw(B: int, H: int, L: int, M: int, D: int, C: int | None, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random inputs; queries and keys have interleaved heads."""
    K = M + L
    shapes = [(B, L, H, D), (B, K, H, D), (B, H, K, D), (H, C or K, D), (H, D), (H, D)]
    tensors = [torch.randn(*shape, device=device, dtype=dtype) for shape in shapes]
    return [tensors[0].transpose(1, 2), tensors[1].transpose(1, 2), *tensors[2:]]


def gradients(attention: Any, tensors: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attention(*leaves, **options)
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator).to(out)
    return torch.autograd.grad(out, leaves, grad)


def assert_close_to_reference(plan: Plan, tensors: list[torch.Tensor], bound: float, window: int | None = None) -> None:
    with stored.using(plan):
        found = gradients(fused.relative_attention, tensors, window=window)
    wanted = gradients(reference.relative_attention, [tensor.double() for tensor in tensors], window=window)
    for got, want in zip(found, wanted, strict=True):
        assert (got.double() - want).norm() < bound * want.norm().clamp(min=1.0)  # with one key they are zero


@interpreted
@pytest.mark.parametrize("planes", [pytest.param(2, marks=pytest.mark.torture), 3])
def test_cells_in_a_small_ring_equal_the_reference(planes: int) -> None:
    """Three cells of one row and head, one of which is stored at a time; a window and a clamp."""
    tensors = draw(1, 1, 17, 9, 16, 7, "cpu", torch.float32)
    assert_close_to_reference(Plan(planes=planes, keys=16, limit=1), tensors, 2e-6, window=18)


@interpreted
@pytest.mark.parametrize(("planes", "lanes", "together"), [(2, 2, 1), (3, 3, 1), (2, 1, 3)])
def test_launches_per_role_equal_the_reference(planes: int, lanes: int, together: int) -> None:
    """Rows and heads in several launches, parts of the keys one after another."""
    tensors = draw(3, 1, 17, 9, 16, 7, "cpu", torch.float32)
    column = planes * 4 * 2 * 16 * 16
    plan = Plan(planes=planes, keys=16, limit=lanes * together * 2 * column, lanes=lanes)
    cells = stored.cells_of(plan, 3, 17, 26, 16, 4)
    assert (cells.parts, cells.lanes, cells.together) == (3, lanes, together)
    assert_close_to_reference(plan, tensors, 2e-6, window=18)


@interpreted
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize(("L", "M", "keys"), [(1, 0, 1024), (1, 20, 16), (32, 0, 16), (16, 32, 1024), (16, 32, 16)])
def test_single_queries_and_complete_tiles_equal_the_reference(L: int, M: int, keys: int, lanes: int) -> None:
    tensors = draw(2, 1, L, M, 16, None, "cpu", torch.float32)
    assert_close_to_reference(Plan(keys=keys, limit=1 << 18, lanes=lanes), tensors, 2e-6)


class Refusal(Exception):
    pass


def test_streams_are_joined_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise memory would be freed that a stream still writes, and a capture would report unjoined streams."""

    class Stream:
        def __init__(self, waits: list[Any]) -> None:
            self.waits = waits

        def wait_stream(self, other: Any) -> None:
            self.waits.append((self, other))

    waits: list[Any] = []
    current, *others = (Stream(waits) for _ in range(3))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(stored, "_stream", lambda _, number: others[number - 1])

    def work() -> None:
        with stored.forked(torch.device("cuda"), 3) as streams:
            assert streams == [current, *others]
            assert waits == [(other, current) for other in others]
            raise Refusal

    with pytest.raises(Refusal):
        work()
    assert waits[2:] == [(current, other) for other in others]


@interpreted
def test_stored_weights_are_dropped_like_those_computed_again() -> None:
    tensors = draw(1, 1, 9, 20, 16, None, "cpu", torch.float32)
    with stored.using(Plan(planes=2, keys=32)):
        found = gradients(fused.relative_attention, tensors, dropout=0.3, seed=3)
    wanted = gradients(fused.relative_attention, tensors, dropout=0.3, seed=3)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.torture
@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize(
    ("B", "H", "L", "M", "D", "C", "window", "keys", "ring"),
    [
        (2, 1, 33, 7, 16, None, None, 1024, 9),
        (2, 2, 20, 50, 16, 13, None, 32, 5),
        (1, 1, 37, 50, 16, None, 20, 16, 2),
        (2, 1, 33, 40, 24, 30, 17, 32, 4),
        (2, 2, 50, 83, 16, None, 62, 1024, 3),
    ],
)
def test_interpreted_kernels_equal_the_reference(
    planes: int, B: int, H: int, L: int, M: int, D: int, C: int | None, window: int | None, keys: int, ring: int
) -> None:
    each = stored.cells_of(Plan(keys=keys, planes=planes), B * H, L, M + L, 16, 4)
    limit = ring * planes * 4 * each.blocks * each.columns * 16 * 16
    tensors = draw(B, H, L, M, D, C, "cpu", torch.float32)
    assert_close_to_reference(Plan(planes=planes, keys=keys, limit=limit), tensors, 2e-6, window)


@interpreted
@pytest.mark.parametrize(("cells", "lag", "producers", "readers"), [(7, 3, 2, 3), (5, 0, 3, 1), (2, 1, 1, 4)])
def test_programs_wait_only_for_smaller_tickets(cells: int, lag: int, producers: int, readers: int) -> None:
    from tests.kernels.ticket_kernel import tickets_kernel

    total = cells * (producers + readers)
    flags, found = torch.zeros(4, dtype=torch.int32), torch.zeros(total + 2, 2, dtype=torch.int32)
    tickets_kernel[(total + 2,)](flags, found, cells, lag, producers, readers)
    order = [(cell, role) for cell, role in found.tolist()]
    assert order[total:] == [(0, -1)] * 2
    at = {program: ticket for ticket, program in enumerate(order[:total])}
    assert len(at) == total
    for cell in range(cells):
        stores, reads = ([at[cell, role] for role in span] for span in spans(producers, readers))
        assert max(stores) < min(reads)
        for later in range(cell + lag + 1, cells):  # the place of the cell in the smallest ring
            assert max(reads) < min(at[later, role] for role in range(producers))


def spans(producers: int, readers: int) -> tuple[range, range]:
    return range(producers), range(producers, producers + readers)


@interpreted
def test_a_program_that_waits_too_long_gives_up_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.kernels.relative_attention import stored_flags
    from tests.kernels.ticket_kernel import waiting_kernel

    monkeypatch.setattr(stored_flags, "PATIENCE", 3)
    flags, result = torch.tensor([5, 2], dtype=torch.int32), torch.zeros(1)
    waiting_kernel[(1,)](flags, result, 2)
    assert flags.tolist() == [5, 2]
    assert result.item() == 0.0
    waiting_kernel[(1,)](flags, result, 3)
    assert flags[0] >= 1 << 30
    assert result.isnan().item()


def test_columns_are_read_in_the_order_in_which_a_warp_stores_them() -> None:
    """Run the store instructions of the 32 threads of a warp on a tile of column numbers."""
    from longspan.kernels.relative_attention.stored_tiles import HALF, STORE_0, column_at

    memory: dict[int, tuple[int, int]] = {}
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for stored_row, offset, words in re.findall(r"\[\$48 \+ ((\d+))\], \{(.*?)\}", STORE_0.value):
            address = row * 128 + column * 8 + int(offset)
            assert stored_row == offset
            for n, word in enumerate(int(name) - 32 for name in re.findall(r"\$(\d+)", words)):
                # Word w of a thread: rows eight apart alternate, then eight columns further.
                for half in (0, 1):
                    held = (row + 8 * (word & 1), column + 8 * (word >> 1) + half)
                    memory[address // 2 + 2 * n + half] = held
    assert len(memory) == 16 * 64
    for place, (row, column) in memory.items():
        assert place // 64 == row
        assert int(column_at.fn(place % 64, HALF)) == column


@pytest.mark.parametrize(
    ("slots", "L", "K"),
    [
        (512, 512, 1024),
        (128, 512, 8704),
        (512, 512, 2560),
        (1, 5, 9),
        (2000, 64, 64),
        (8, 8192, 16384),
        (8, 65536, 65536),
    ],
)
@pytest.mark.parametrize("limit", [1, 104 << 20, 208 << 20, 416 << 20])
@pytest.mark.parametrize("lanes", [0, 1, 2, 4])
def test_cells_cover_all_keys_within_the_limit(slots: int, L: int, K: int, limit: int, lanes: int) -> None:
    plan = Plan(limit=limit, lanes=lanes, keys=4096 if lanes else 1024)
    cells = stored.cells_of(plan, slots, L, K, 64, 2)
    assert cells.all_tiles == -(-(K - L) // 64) + -(-L // 64)
    assert (cells.parts - 1) * cells.tiles < cells.all_tiles <= cells.parts * cells.tiles
    assert cells.tiles * 64 <= plan.keys
    size = cells.ring * cells.blocks * cells.columns * plan.planes * 64 * 64 * 2
    assert size <= limit or (cells.ring, cells.tiles) == (1, 1)
    if lanes:
        groups = list(stored.groups_of(cells))
        assert {group.lane for group in groups} == set(range(cells.lanes))
        assert all(group.slots <= cells.together for group in groups)
        slot_parts = [(slot, g.part) for g in groups for slot in range(g.first_slot, g.first_slot + g.slots)]
        assert sorted(slot_parts) == [(slot, part) for slot in range(slots) for part in range(cells.parts)]
        lane_of = {(g.lane, g.first_slot) for g in groups}
        assert len(lane_of) == len({slot for _, slot in lane_of})  # all parts of a slot
    else:
        # Else a producer would wait for a reader with a larger ticket.
        assert 0 <= cells.lag < cells.ring <= cells.count


def test_the_plan_depends_on_the_keys_the_width_and_on_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "is_worth_it", lambda _: True)
    query, wide = torch.empty(1, 1, 1, 64), torch.empty(1, 1, 1, 128)
    assert stored.chosen(query, 1024, None) == stored.chosen(query, 1024, None, window=512) == Plan()
    assert stored.chosen(query, 1024, torch.zeros(1, 1)) is None
    assert stored.chosen(query, 2560, None) is None  # launches would take longer than the kernels
    assert stored.chosen(wide, 1024, None) == Plan(planes=3)
    monkeypatch.setattr(stored, "is_for_graph", lambda _: True)
    assert stored.chosen(query, 1024, None) == Plan()
    assert stored.chosen(query, 2560, None) == stored.IN_GRAPH
    assert stored.chosen(wide, 1024, None) == replace(stored.IN_GRAPH, planes=3)
    assert stored.chosen(query, 8704, None, window=1000) is None  # most tiles are hidden


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("D", [32, 41, 64, 80, 128])
def test_all_head_widths_on_the_gpu(planes: int, D: int, lanes: int) -> None:
    plan = Plan(planes=planes, keys=256, limit=4 << 20, lanes=lanes)
    tensors = draw(3, 2, 130, 700, D, 300, "cuda", torch.bfloat16)
    assert_close_to_reference(plan, tensors, 1e-2)
    assert_close_to_reference(plan, tensors, 1e-2, window=500)


@pytest.mark.gpu
@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize(("limit", "ahead"), [(1, 384), (8 << 20, 384), (64 << 20, 64), (64 << 20, 4096)])
def test_many_more_cells_than_the_ring_on_the_gpu(planes: int, limit: int, ahead: int) -> None:
    """Thousands of programs, so that they really wait for each other; twice, and bit by bit except for the position
    table."""
    tensors = draw(16, 8, 512, 700, 64, None, "cuda", torch.bfloat16)
    with stored.using(Plan(planes=planes, limit=limit, ahead=ahead, keys=512)):
        first, again = (gradients(fused.relative_attention, tensors) for _ in range(2))
    wanted = gradients(fused.relative_attention, tensors)
    for got, want in zip(first, wanted, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-2
    for n in (0, 1, 2, 4, 5):
        assert torch.equal(first[n], again[n])


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_launches_in_a_graph(lanes: int) -> None:
    """Replayed on other inputs: bit by bit as without a graph, except for the position table, and close to the kernels
    that store nothing."""
    tensors = draw(16, 8, 512, 2100, 64, None, "cuda", torch.bfloat16)
    fixed = [tensor.clone() for tensor in tensors]
    graph = torch.cuda.CUDAGraph()
    with stored.using(Plan(keys=1024, limit=64 << 20, lanes=lanes)):
        plain = gradients(fused.relative_attention, tensors)
        torch.cuda.synchronize()
        generator, grad = torch.Generator().manual_seed(5), torch.empty_like(tensors[0])
        grad.copy_(torch.randn(grad.shape, generator=generator))
        with torch.cuda.graph(graph):
            leaves = [tensor.detach().requires_grad_() for tensor in fixed]
            found = torch.autograd.grad(fused.relative_attention(*leaves), leaves, grad)
    for _ in range(2):
        for tensor in fixed:
            tensor.zero_()
        graph.replay()
        for tensor, given in zip(fixed, tensors, strict=True):
            tensor.copy_(given)
        graph.replay()
        for n in (0, 1, 2, 4, 5):
            assert torch.equal(found[n], plain[n])
    wanted = gradients(fused.relative_attention, tensors)
    for got, want in zip(found, wanted, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [0, 2])
def test_the_same_dropout_on_the_gpu(lanes: int) -> None:
    tensors = draw(2, 2, 200, 333, 64, None, "cuda", torch.bfloat16)
    with stored.using(Plan(keys=256, lanes=lanes)):
        found = gradients(fused.relative_attention, tensors, dropout=0.2, seed=3)
    wanted = gradients(fused.relative_attention, tensors, dropout=0.2, seed=3)
    for got, want in zip(found, wanted, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "D"), [(512, 64), (2100, 64), (8192, 64), (512, 128)])
def test_the_default_equals_the_reference_with_and_without_a_graph(M: int, D: int) -> None:
    """A batch for which tiles are stored; the gradients of queries, keys and values of one row against float64."""
    tensors = draw(16, 8, 512, M, D, None, "cuda", torch.bfloat16)
    grad = torch.randn_like(tensors[0])
    found: list[Any] = []

    def work() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        found.append(torch.autograd.grad(fused.relative_attention(*leaves), leaves, grad))

    work()
    warm_up(work)
    capture(work).replay()
    torch.cuda.synchronize()
    leaves = [(x[:1] if n < 3 else x).double().requires_grad_() for n, x in enumerate(tensors)]
    wanted = torch.autograd.grad(reference.relative_attention(*leaves), leaves[:3], grad[:1].double())
    for some in found:
        for got, want in zip(some[:3], wanted, strict=True):
            assert (got[:1].double() - want).norm() < 1.5e-2 * want.norm()
