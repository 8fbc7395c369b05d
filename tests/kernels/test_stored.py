"""The backward pass with stored tiles against the reference in float64 and against the kernels that store nothing."""

import re
from typing import Any

import pytest
import torch

from longspan.kernels.relative_attention import fused, reference, stored
from longspan.kernels.relative_attention.stored import Plan

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


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
        assert (got.double() - want).norm() / want.norm() < bound


@interpreted
def test_parts_of_rows_and_keys_with_a_window_equal_the_reference() -> None:
    """Three planes, one row at a time, keys in two parts, a clamp."""
    tensors = draw(2, 1, 17, 9, 16, 7, "cpu", torch.float32)
    assert_close_to_reference(Plan(planes=3, keys=32, limit=1), tensors, 2e-6, window=18)


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
    ("B", "H", "L", "M", "D", "C", "window", "keys", "longest"),
    [
        (2, 1, 33, 7, 16, None, None, 1024, True),
        (2, 2, 20, 50, 16, 13, None, 32, False),
        (1, 1, 37, 50, 16, None, 20, 16, True),
        (2, 1, 33, 40, 24, 30, 17, 32, False),
    ],
)
def test_interpreted_kernels_equal_the_reference(
    planes: int, B: int, H: int, L: int, M: int, D: int, C: int | None, window: int | None, keys: int, longest: bool
) -> None:
    tensors = draw(B, H, L, M, D, C, "cpu", torch.float32)
    assert_close_to_reference(Plan(planes=planes, keys=keys, longest=longest), tensors, 2e-6, window)


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
    ("B", "H", "L", "K"), [(64, 8, 512, 1024), (16, 8, 512, 8704), (64, 8, 512, 2560), (1, 1, 5, 9)]
)
def test_parts_cover_everything_within_the_limit(B: int, H: int, L: int, K: int) -> None:
    plan = Plan()
    parts = stored.parts_of(plan, B, H, L, K, 64, 2)
    rows = [row for first, count in parts.of_rows() for row in range(first, first + count)]
    tiles = [tile for first, end in parts.of_tiles() for tile in range(first, end)]
    assert rows == list(range(B))
    assert tiles == list(range(-(-(K - L) // 64) + -(-L // 64)))
    blocks = -(-L // 64)
    size = plan.streams * parts.rows * H * blocks * (parts.tiles + parts.split) * plan.planes * 64 * 64 * 2
    assert size <= max(plan.limit, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("D", [32, 41, 64, 80, 128])
def test_all_head_widths_on_the_gpu(planes: int, D: int) -> None:
    plan = Plan(planes=planes, keys=256, limit=1)
    tensors = draw(3, 2, 130, 700, D, 300, "cuda", torch.bfloat16)
    assert_close_to_reference(plan, tensors, 1e-2)
    assert_close_to_reference(plan, tensors, 1e-2, window=500)


@pytest.mark.gpu
def test_the_same_dropout_on_the_gpu() -> None:
    tensors = draw(2, 2, 200, 333, 64, None, "cuda", torch.bfloat16)
    with stored.using(Plan(keys=256)):
        found = gradients(fused.relative_attention, tensors, dropout=0.2, seed=3)
    wanted = gradients(fused.relative_attention, tensors, dropout=0.2, seed=3)
    for got, want in zip(found, wanted, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-2
