"""The short convolution against torch's conv1d, and its cached inputs against a convolution of the complete stream."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from longspan.cache import SegmentMask
from longspan.cache.segment import first_keys
from longspan.nn.convolution import ShortConvolution

E = 5


def make(taps: int) -> ShortConvolution:
    convolution = ShortConvolution(taps, E).double()
    torch.nn.init.normal_(convolution.weight)
    return convolution


def reference(line: torch.Tensor, weight: torch.Tensor, tokens: int) -> torch.Tensor:
    """h + a depthwise conv1d of the earlier positions; `line` starts N positions before the first token."""
    moved = F.conv1d(line[:, :-1].transpose(1, 2), weight.flip(0).t()[:, None], groups=E)
    return line[:, -tokens:] + moved.transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("taps", [1, 3, 4])
def test_it_equals_a_depthwise_convolution_with_gradients(taps: int, tokens: int) -> None:
    convolution, mask = make(taps), SegmentMask(0, tokens, 1, None, None, None)
    before = torch.randn(2, taps, E, dtype=torch.float64)
    h = torch.randn(2, tokens, E, dtype=torch.float64, requires_grad=True)
    weight = convolution.weight.detach().clone().requires_grad_()
    expected = reference(torch.cat([before, h], dim=1), weight, tokens)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (h, weight), upstream)
    output, inputs = convolution(h, before, mask)
    found = torch.autograd.grad(output, (h, convolution.weight), upstream)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert torch.equal(inputs, torch.cat([before, h], dim=1)[:, -taps:])
    assert not inputs.requires_grad
    zeros = reference(F.pad(h, (0, 0, taps, 0)), weight, tokens)
    without, nothing = convolution(h, None, mask)
    torch.testing.assert_close(without, zeros, rtol=0, atol=1e-12)
    assert nothing is None


@given(
    taps=st.integers(1, 4),
    documents=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 17)), max_size=5),
    cuts=st.lists(st.integers(1, 17), max_size=6, unique=True).map(sorted),
)
def test_cached_inputs_continue_it_across_segments_and_not_across_documents(
    taps: int, documents: list[tuple[int, int]], cuts: list[int]
) -> None:
    """Every document equals its own convolution, for any segmentation of the stream."""
    convolution = make(taps)
    h = torch.randn(2, 18, E, dtype=torch.float64)
    starts = torch.zeros(2, 18, dtype=torch.bool)
    for row, place in documents:
        starts[row, place] = True
    expected = torch.empty_like(h)
    for row in range(2):
        edges = sorted({0, 18, *(place for r, place in documents if r == row)})
        for a, b in pairwise(edges):
            alone = F.pad(h[row : row + 1, a:b], (0, 0, taps, 0))
            expected[row, a:b] = reference(alone, convolution.weight, b - a)[0]
    inputs, length, found = torch.zeros(2, taps, E, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), []
    for a, b in zip([0, *cuts], [*cuts, 18], strict=True):
        here = starts[:, a:b] if starts[:, a:b].any() else None
        first = first_keys(length, taps, b - a, here)
        piece, inputs = convolution(h[:, a:b], inputs, SegmentMask(taps, b - a, taps, None, first, here))
        length = (taps + b - a - first[:, -1]).clamp(max=taps)
        found.append(piece)
    assert not inputs.requires_grad
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-12)
