"""The scan against a loop: values, gradients, and gates whose product underflows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.kernels.recurrence import recurrence, stepped_recurrence


def random_inputs(
    T: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(2, T, 3, generator=generator, dtype=torch.float64).sqrt()
    b = torch.randn(2, T, 3, generator=generator, dtype=torch.float64)
    c = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    return tuple(t.to(dtype).requires_grad_() for t in (a, b, c))


@given(T=st.integers(1, 70), seed=st.integers(0, 99))
def test_values_and_gradients_equal_those_of_the_loop(T: int, seed: int) -> None:
    inputs, weight = random_inputs(T, seed=seed), torch.randn(2, T, 3, dtype=torch.float64)
    found, expected = recurrence(*inputs), stepped_recurrence(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, want in zip(torch.autograd.grad((found * weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("T", [1, 2, 3, 7, 8, 13])
def test_gradients_equal_finite_differences(T: int) -> None:
    assert torch.autograd.gradcheck(recurrence, random_inputs(T))


@pytest.mark.parametrize("T", [63, 500, 4097])
def test_float32_is_as_accurate_as_the_loop(T: int) -> None:
    exact = stepped_recurrence(*random_inputs(T))
    a, b, c = random_inputs(T, torch.float32)
    error = (recurrence(a, b, c) - exact).abs().max()
    assert error < 1e-5
    assert error < 4 * (stepped_recurrence(a, b, c) - exact).abs().max() + 1e-6


@pytest.mark.parametrize("a", [0.0, 1e-30, 1.0])
def test_gates_that_stay_closed_or_open(a: float) -> None:
    """The product of 3,000 gates of 1e-30 underflows, so an implementation that divides by it would fail."""
    T = 3000
    gates = torch.full((1, T, 2), a)
    gates[:, T // 2] = 0.0
    b, c = torch.randn(1, T, 2), torch.randn(1, 2)
    found = recurrence(gates.requires_grad_(), b.requires_grad_(), c)
    torch.testing.assert_close(found, stepped_recurrence(gates, b, c), rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert gates.grad.isfinite().all()
    assert b.grad.isfinite().all()


def test_the_number_of_operations_grows_with_the_logarithm_of_the_length() -> None:
    """Sixteen times the tokens are four more levels of the scan."""
    counts = []
    for T in (64, 1024):
        inputs = [t.detach() for t in random_inputs(T)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            recurrence(*inputs)
        counts.append(sum(event.count for event in profile.key_averages()))
    assert counts[1] < 2 * counts[0]
