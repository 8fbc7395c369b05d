"""Cross-entropy without logits in memory, against `cross_entropy` in float64: losses and every gradient."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longspan.kernels import cluster_losses as kernels

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(N: int, V: int, D: int, **kind: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden, table, bias = (torch.randn(*shape, device=DEVICE).to(**kind) for shape in ((N, D), (V, D), (V,)))
    return [hidden, table * D**-0.5, bias]


def assert_close(
    got: torch.Tensor, want: torch.Tensor, ours: list[torch.Tensor], exact: list[torch.Tensor], bound: float
) -> None:
    """Compare losses, and gradients of a weighted sum of them."""
    weights = torch.randn_like(want)
    got_grads = torch.autograd.grad((got * weights.float()).sum(), ours)
    want_grads = torch.autograd.grad((want * weights).sum(), exact)
    names = ("losses", "hidden", "table", "bias")
    for name, a, b in zip(names, (got, *got_grads), (want, *want_grads), strict=True):
        error = (a.double() - b).norm() / b.norm().clamp(min=1e-9)
        assert error < bound, f"{name} is off by {error:.1e}"


def compare_cluster(N: int, V: int, D: int, here: torch.Tensor, temperature: float, bound: float, **kind: Any) -> None:
    ours = [t.requires_grad_() for t in draw(N, V, D, **kind)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    targets = torch.where(here, torch.randint(V, (N,), device=DEVICE), -5)
    got = kernels.cluster_losses(*ours, targets, here, temperature)
    scores = F.linear(exact[0][here], exact[1], exact[2]) / temperature
    tail = F.cross_entropy(scores, targets[here], reduction="none")
    want = torch.zeros(N, dtype=torch.float64, device=DEVICE).masked_scatter(here, tail)
    assert (got[~here] == 0).all()
    assert_close(got, want, ours, exact, bound)


def compare_chunked(N: int, V: int, D: int, temperature: float, bound: float, **kind: Any) -> None:
    ours = [t.requires_grad_() for t in draw(N, V, D, **kind)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    targets = torch.randint(V, (N,), device=DEVICE)
    got = kernels.chunked_losses(*ours, targets, temperature)
    want = F.cross_entropy(F.linear(*exact) / temperature, targets, reduction="none")
    assert_close(got, want, ours, exact, bound)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
def test_an_interpreted_cluster() -> None:
    """More tokens, entries and units than fit a tile, none of them a multiple of one."""
    compare_cluster(21, 20, 17, torch.arange(21) % 7 != 0, 1.5, 1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
def test_an_interpreted_cluster_without_tokens() -> None:
    ours = [t.requires_grad_() for t in draw(5, 7, 4)]
    got = kernels.cluster_losses(*ours, torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.bool))
    assert not got.any()
    got.sum().backward()
    assert not any(t.grad.any() for t in ours if t.grad is not None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
def test_interpreted_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK_SCORES", 3 * 37)  # chunks of 3 tokens, the last of 1
    compare_chunked(7, 37, 5, 0.7, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("V", "D", "share", "dtype", "bound"),
    [
        (5000, 16, 0.1, torch.bfloat16, 1e-2),
        (3001, 64, 0.02, torch.bfloat16, 1e-2),
        (1000, 410, 1.0, torch.bfloat16, 1e-2),
        (2000, 64, 0.3, torch.float32, 1e-4),
    ],
)
def test_compiled_clusters(V: int, D: int, share: float, dtype: torch.dtype, bound: float) -> None:
    compare_cluster(1500, V, D, torch.rand(1500, device="cuda") < share, 1.2, bound, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)])
def test_compiled_chunks(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK_SCORES", 400 * 5003)
    compare_chunked(1500, 5003, 128, 0.9, bound, dtype=dtype)
