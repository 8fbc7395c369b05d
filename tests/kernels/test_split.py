"""Blocks of queries split over several programs: against the reference in float64, and against one program."""

from typing import Any

import pytest
import torch

from longspan.kernels.relative_attention import fused, reference, split
from tests.kernels.test_fused import documents, draw

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


def results(attention: Any, tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """The output and the gradient of every input."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attention(*leaves, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_split_equals_reference(parts: int, tensors: list[torch.Tensor], bound: float, **options: Any) -> None:
    with split.using(parts):
        found = results(fused.relative_attention, tensors, **options)
    wanted = results(reference.relative_attention, [tensor.double() for tensor in tensors], **options)
    for got, want, like in zip(found, wanted, [tensors[0], *tensors], strict=True):
        assert got.dtype == like.dtype
        assert (got.double() - want).norm() / want.norm() < bound


@interpreted
@pytest.mark.parametrize(
    ("parts", "B", "H", "L", "M", "D", "C", "window", "resets"),
    [
        (2, 2, 1, 5, 23, 16, None, None, False),
        (3, 1, 1, 17, 50, 16, 13, None, False),
        (5, 1, 1, 18, 30, 24, 9, 20, True),  # more parts than tiles
    ],
)
def test_interpreted_parts_equal_the_reference(
    parts: int, B: int, H: int, L: int, M: int, D: int, C: int | None, window: int | None, resets: bool
) -> None:
    tensors = draw(B, H, L, M, D, C, "cpu", torch.float32)
    first_key = documents(B, L, M, "cpu") if resets else None
    discount = 2.0 if C else 0.0
    assert_split_equals_reference(parts, tensors, 2e-6, window=window, first_key=first_key, discount=discount)


@interpreted
def test_parts_drop_the_same_weights_as_the_whole() -> None:
    tensors = draw(1, 1, 9, 30, 16, None, "cpu", torch.float32)
    whole = results(fused.relative_attention, tensors, dropout=0.3, seed=3)
    with split.using(2):
        found = results(fused.relative_attention, tensors, dropout=0.3, seed=3)
    for got, want in zip(found, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@interpreted
def test_gradients_of_positions_have_the_dtype_of_the_table() -> None:
    """The kernel that joins the parts also casts: distances, u and w in bfloat16 with float32 queries."""
    tensors = draw(1, 1, 9, 30, 16, 12, "cpu", torch.float32)
    tensors[3:] = [tensor.bfloat16() for tensor in tensors[3:]]
    exact = results(fused.relative_attention, [tensor.float() for tensor in tensors])
    with split.using(2):
        found = results(fused.relative_attention, tensors)
    for got, want, like in zip(found[4:], exact[4:], tensors[3:], strict=True):
        assert got.dtype == like.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("programs", "tiles", "wanted"),
    [
        (64, 24, 4),  # dynamic evaluation: batch 1, 8 heads, 512 queries, memory 1,024
        (131, 24, 2),
        (132, 24, 1),
        (4096, 16, 1),
        (8, 9, 3),
        (8, 2, 1),
    ],
)
def test_small_batches_are_split(programs: int, tiles: int, wanted: int) -> None:
    assert split.chosen_parts(programs, tiles, 132) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("L", "M"), [(512, 1024), (500, 1001), (63, 2100)])
def test_parts_equal_the_reference_on_the_gpu(L: int, M: int, dtype: torch.dtype, parts: int) -> None:
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_split_equals_reference(parts, draw(1, 4, L, M, 64, 1024, "cuda", dtype), bound)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [32, 41, 64, 80, 128])
def test_parts_with_all_options_at_all_head_widths(D: int) -> None:
    L, M = 130, 700
    tensors = draw(2, 2, L, M, D, 300, "cuda", torch.bfloat16)
    assert_split_equals_reference(3, tensors, 1e-2, window=500, discount=2.0)
    assert_split_equals_reference(5, tensors, 1e-2, first_key=documents(2, L, M, "cuda"))


@pytest.mark.gpu
def test_parts_are_deterministic_but_for_distances() -> None:
    tensors = draw(1, 8, 512, 1024, 64, 1024, "cuda", torch.bfloat16)
    first, second = (results(fused.relative_attention, tensors) for _ in range(2))
    for n, (a, b) in enumerate(zip(first, second, strict=True)):
        assert n == 4 or torch.equal(a, b)
