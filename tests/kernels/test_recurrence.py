"""The scan against the loop it stands for: values, gradients, and numbers that would break a quotient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.kernels.recurrence import recurrence, stepped_recurrence


def some(T: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    a = torch.rand(2, T, 3, generator=chance, dtype=torch.float64).sqrt()
    b = torch.randn(2, T, 3, generator=chance, dtype=torch.float64)
    c = torch.randn(2, 3, generator=chance, dtype=torch.float64)
    return tuple(t.to(dtype).requires_grad_() for t in (a, b, c))


@given(T=st.integers(1, 70), seed=st.integers(0, 99))
def test_values_and_gradients_are_the_loop_s(T: int, seed: int) -> None:
    inputs, weight = some(T, seed=seed), torch.randn(2, T, 3, dtype=torch.float64)
    found, expected = recurrence(*inputs), stepped_recurrence(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, want in zip(torch.autograd.grad((found * weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("T", [1, 2, 3, 7, 8, 13])
def test_gradients_are_those_of_differences(T: int) -> None:
    assert torch.autograd.gradcheck(recurrence, some(T))


@pytest.mark.parametrize("T", [63, 500, 4097])
def test_float32_is_as_exact_as_the_loop(T: int) -> None:
    exact = stepped_recurrence(*some(T))
    a, b, c = some(T, torch.float32)
    error = (recurrence(a, b, c) - exact).abs().max()
    assert error < 1e-5
    assert error < 4 * (stepped_recurrence(a, b, c) - exact).abs().max() + 1e-6


@pytest.mark.parametrize("a", [0.0, 1e-30, 1.0])
def test_gates_that_are_shut_or_open_for_long(a: float) -> None:
    """The product of 3,000 gates of 1e-30 is nothing any float holds, and no quotient by it means anything."""
    T = 3000
    gates = torch.full((1, T, 2), a)
    gates[:, T // 2] = 0.0
    b, c = torch.randn(1, T, 2), torch.randn(1, 2)
    found = recurrence(gates.requires_grad_(), b.requires_grad_(), c)
    torch.testing.assert_close(found, stepped_recurrence(gates, b, c), rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert gates.grad.isfinite().all()
    assert b.grad.isfinite().all()


def test_it_makes_no_step_for_every_token() -> None:
    """Calls grow with the logarithm of the length: sixteen times the tokens are four more levels of the scan."""
    counts = []
    for T in (64, 1024):
        inputs = [t.detach() for t in some(T)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            recurrence(*inputs)
        counts.append(sum(event.count for event in profile.key_averages()))
    assert counts[1] < 2 * counts[0]
