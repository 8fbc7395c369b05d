"""The kernels of the norm of queries and keys against its plain form in float64: outputs and gradients."""

import pytest
import torch

from longspan.nn.attention import HeadNorm

pytest.importorskip("triton")


def compare(shape: tuple[int, ...], heads: int, device: str, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    plain = HeadNorm(heads, shape[-1] // heads).to(device).double()
    torch.nn.init.normal_(plain.weight, 1.0, 0.3)
    ours = HeadNorm(heads, shape[-1] // heads).to(device)
    ours.load_state_dict(plain.state_dict())
    plain.fused, ours.fused = False, True
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, want = ours(x), plain(exact)
    assert got.dtype == dtype
    grad = torch.randn_like(got)
    found = torch.autograd.grad(got, [x, ours.weight], grad)
    wanted = torch.autograd.grad(want, [exact, plain.weight], grad.double())
    for a, b in zip((got, *found), (want, *wanted), strict=True):
        assert (a.double() - b).norm() / b.norm() < bound


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
def test_interpreted_kernels_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill no block, heads that fill no power of two, and fewer programs than blocks."""
    monkeypatch.setattr("longspan.kernels.head_norm.PROGRAMS", 2)
    compare((3, 3, 10), 2, "cpu", torch.float32, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("shape", "heads"), [((3, 700, 512), 8), ((2, 33, 82), 2)])
def test_compiled_kernels(shape: tuple[int, ...], heads: int, dtype: torch.dtype, bound: float) -> None:
    compare(shape, heads, "cuda", dtype, bound)
