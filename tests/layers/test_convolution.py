"""The short convolution against torch's own, and its tails against the convolution of the whole stream."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from longspan.layers.convolution import ShortConvolution
from longspan.memory.segments import first_visible
from longspan.memory.tails import mix, seen_taps

E = 5


def made(taps: int) -> ShortConvolution:
    convolution = ShortConvolution(taps, E).double()
    torch.nn.init.normal_(convolution.weight)
    return convolution


def by_torch(line: torch.Tensor, weight: torch.Tensor, tokens: int) -> torch.Tensor:
    """h + a depthwise conv1d of what is one place and more back; `line` begins N places before the first token."""
    moved = F.conv1d(line[:, :-1].transpose(1, 2), weight.flip(0).t()[:, None], groups=E)
    return line[:, -tokens:] + moved.transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("taps", [1, 3, 4])
def test_it_is_a_depthwise_convolution_gradients_too(taps: int, tokens: int) -> None:
    convolution = made(taps)
    before = torch.randn(2, taps, E, dtype=torch.float64)
    h = torch.randn(2, tokens, E, dtype=torch.float64, requires_grad=True)
    weight = convolution.weight.detach().clone().requires_grad_()
    expected = by_torch(torch.cat([before, h], dim=1), weight, tokens)
    push = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (h, weight), push)
    found = torch.autograd.grad(mixed := convolution(h, before), (h, convolution.weight), push)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    zeros = by_torch(F.pad(h, (0, 0, taps, 0)), weight, tokens)
    torch.testing.assert_close(convolution(h), zeros, rtol=0, atol=1e-12)


@given(
    taps=st.integers(1, 4),
    begins=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 17)), max_size=5),
    cuts=st.lists(st.integers(1, 17), max_size=6, unique=True).map(sorted),
)
def test_tails_carry_it_across_cuts_and_not_across_documents(
    taps: int, begins: list[tuple[int, int]], cuts: list[int]
) -> None:
    """Each document as torch convolves it alone, however the stream is cut; a remembered position per token."""
    convolution = made(taps)
    h = torch.randn(2, 18, E, dtype=torch.float64)
    starts = torch.zeros(2, 18, dtype=torch.bool)
    for row, place in begins:
        starts[row, place] = True
    expected = torch.empty_like(h)
    for row in range(2):
        edges = sorted({0, 18, *(place for r, place in begins if r == row)})
        for a, b in pairwise(edges):
            alone = F.pad(h[row : row + 1, a:b], (0, 0, taps, 0))
            expected[row, a:b] = by_torch(alone, convolution.weight, b - a)[0]
    tail, length, found = torch.zeros(2, taps, E, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), []
    for a, b in zip([0, *cuts], [*cuts, 18], strict=True):
        here = starts[:, a:b] if starts[:, a:b].any() else None
        first = first_visible(length, taps, b - a, here)
        piece, tail = mix(convolution, h[:, a:b], tail, None if here is None else seen_taps(first, taps, taps))
        length = (taps + b - a - first[:, -1]).clamp(max=taps)
        found.append(piece)
    assert not tail.requires_grad
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-12)
