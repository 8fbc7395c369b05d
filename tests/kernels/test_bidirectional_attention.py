"""Attention with a bias against the definition, and the definition against loops in plain Python."""

import math
from typing import Any

import pytest
import torch

from longspan.errors import UnknownNameError
from longspan.kernels.bidirectional_attention import View, biased, bidirectional_attention, forced, reference

NAMES = ("query", "key", "value", "distance", "u", "w", "s", "segments")


def inputs(
    B: int, H: int, L: int, K: int, D: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> dict[str, Any]:
    """Queries at random positions; the first one sees nothing, the second only the last key."""
    torch.manual_seed(0)
    shapes = [(B, H, L, D), (B, H, K, D), (B, H, K, D), (H, 2 * K, D), (H, D), (H, D), (H, D), (2, H, D)]
    made: dict[str, Any] = {
        name: torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()
        for name, shape in zip(NAMES, shapes, strict=True)
    }
    visible = torch.rand(B, L, K) < 0.6
    visible[:, :2] = False
    visible[:, 1, -1] = True
    at = torch.randint(0, K + 1, (B, L))
    view = View(visible, at, torch.rand(B, L, K) < 0.4)
    made["view"] = View(*(part.to(device) for part in view))
    return made


def without_segments(x: dict[str, Any]) -> dict[str, Any]:
    """One view for all rows of the batch, and no segments."""
    return x | {"view": View(x["view"].visible[:1], x["view"].at[:1])}


def loops(x: dict[str, Any], b: int, h: int, i: int) -> list[float]:
    x = x | {name: x[name].detach() for name in NAMES}
    q, (visible, at, other) = x["query"][b, h, i], x["view"]
    K, D, scores = x["key"].shape[2], len(q), {}
    for j in range(K):
        if visible[b, i, j]:
            r, e = x["distance"][h, K - (int(at[b, i]) - j)], x["segments"][int(other[b, i, j]), h]
            terms = (q + x["u"][h]) @ x["key"][b, h, j], (q + x["w"][h]) @ r, (q + x["s"][h]) @ e
            scores[j] = math.exp(float(sum(terms)) / math.sqrt(D))
    total = sum(scores.values())
    return [sum(s / total * float(x["value"][b, h, j, d]) for j, s in scores.items()) for d in range(D)]


def test_the_reference_equals_the_scores_of_the_paper() -> None:
    x = inputs(2, 2, 4, 5, 3)
    out = reference.bidirectional_attention(**x)
    for b, h, i in [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]:
        torch.testing.assert_close(out[b, h, i].detach(), torch.tensor(loops(x, b, h, i), dtype=torch.float64))


def compare(x: dict[str, Any], bound: float) -> None:
    """Outputs and gradients of both forms; the reference in float64."""
    exact = x | {name: x[name].detach().double().requires_grad_() for name in NAMES}
    used = NAMES if x["view"].other is not None else NAMES[:6]
    wanted = reference.bidirectional_attention(**exact)
    found = biased.bidirectional_attention(**x)
    assert not found[:, :, 0].any(), "a query that sees nothing"
    grad = torch.randn_like(wanted)
    grads = torch.autograd.grad(found, [x[name] for name in used], grad.to(found.dtype))
    expected = torch.autograd.grad(wanted, [exact[name] for name in used], grad)
    with torch.no_grad():
        scored = biased.bidirectional_attention(**x)
    pairs = zip(("output", "scored", *used), (found, scored, *grads), (wanted, wanted, *expected), strict=True)
    apart = {name: ((a.double() - b).norm() / b.norm()).item() for name, a, b in pairs}
    assert all(value < bound for value in apart.values()), apart  # NaN is not, but `max` would ignore it


@pytest.mark.parametrize(("L", "K"), [(7, 5), (19, 33)])
def test_the_biased_form_equals_the_reference(L: int, K: int) -> None:
    x = inputs(2, 3, L, K, 4)
    compare(x, 1e-12)
    compare(without_segments(x), 1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
def test_interpreted_kernels_equal_the_operation_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill no block, and more distances than a block."""
    pytest.importorskip("triton")
    from longspan.kernels.bidirectional_attention import kernels

    monkeypatch.setattr(kernels, "block", lambda _: 16)
    visible, at, other = (part[:, 1:] for part in inputs(2, 2, 3, 11, 4)["view"])
    scores, more = torch.randn(2, 2, 2, 24), torch.randn(2, 2, 2)
    for given in ((other, more), (None, None)):
        wanted = biased.scores_by_key(scores, at, visible, *given)
        found = biased.empty_bias(scores, visible)
        kernels.launch_by_key(scores, at, visible, *given, found, biased.HIDDEN)
        torch.testing.assert_close(found, wanted)
        grad = torch.randn_like(wanted)
        of_scores, of_more = biased._backward(grad, at, visible, given[0], 24)
        results = torch.full_like(of_scores, torch.nan), torch.full_like(of_more, torch.nan)
        kernels.launch_by_distance(grad, at, visible, given[0], *results)
        torch.testing.assert_close(results[0], of_scores, rtol=0, atol=0)
        torch.testing.assert_close(results[1], of_more)


def test_hidden_scores_keep_a_precision_below_one() -> None:
    """On CUDA the gradient of a query that sees nothing was NaN with -1e30."""
    hidden = torch.tensor(biased.HIDDEN, dtype=torch.bfloat16).float()
    assert torch.nextafter(hidden, torch.tensor(0.0)) - hidden < 0.1
    assert (hidden + 1e4).exp() == 0.0


def test_forms_are_chosen_by_name_and_dropout_needs_the_reference() -> None:
    x = inputs(1, 1, 2, 3, 4)
    with forced("biased"):
        assert bidirectional_attention(**x).grad_fn.name() == biased.bidirectional_attention(**x).grad_fn.name()
        torch.manual_seed(1)
        dropped = bidirectional_attention(**x, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(dropped, reference.bidirectional_attention(**x, dropout=0.5))
    with pytest.raises(UnknownNameError), forced("fastest"):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-2), (torch.float32, 1e-3), (torch.float64, 1e-10)])
@pytest.mark.parametrize(("L", "K", "D"), [(298, 512, 64), (42, 512, 64), (33, 77, 64), (5, 9, 32)])
def test_on_cuda(L: int, K: int, D: int, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the bias too, which not every kernel of torch computes."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    x = inputs(3, 6, L, K, D, dtype, "cuda")
    compare(x, bound)
    compare(without_segments(x), bound)


@pytest.mark.gpu
def test_training_chooses_the_memory_efficient_kernel() -> None:
    x = without_segments(inputs(2, 6, 298, 512, 64, torch.bfloat16, "cuda"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bidirectional_attention(**x).sum().backward()
    calls = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_efficient_attention_backward" in calls
    assert not any("constant_pad" in call or "scatter" in call for call in calls)
