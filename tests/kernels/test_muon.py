"""The kernels of Muon against its plain code in float64: shapes that fit no tile, tall matrices, blocked steps."""

import pytest
import torch
from torch import nn

from longspan.training.optimizers import Muon

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


def pair(shapes: list[tuple[int, int]], device: str) -> tuple[Muon, Muon]:
    """Two optimizers with equal weights: the plain code in float64, and the kernels."""
    torch.manual_seed(0)
    exact = [nn.Parameter(torch.randn(shape, dtype=torch.float64, device=device)) for shape in shapes]
    ours = [nn.Parameter(p.detach().float()) for p in exact]
    plain, fused = (Muon(some, lr=0.05, momentum=0.9, weight_decay=0.1) for some in (exact, ours))
    plain.fused, fused.fused = False, True
    return plain, fused


def weights(optimizer: Muon) -> list[nn.Parameter]:
    return list(optimizer.param_groups[0]["params"])


def give_gradients(plain: Muon, fused: Muon) -> None:
    for p, q in zip(weights(plain), weights(fused), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.float()


def distance(plain: Muon, fused: Muon) -> float:
    """The largest relative error of a matrix of momenta, or of the weights' change since the first step."""
    found = []
    for p, q in zip(weights(plain), weights(fused), strict=True):
        for want, got in ((p.detach(), q.detach()), (plain.state[p]["momentum"], fused.state[q]["momentum"])):
            found.append((got.double() - want).norm() / want.norm())
    return float(torch.stack(found).max())  # NaN if one of them is


@interpreted
def test_interpreted_kernels_equal_the_plain_code() -> None:
    """A wide and a tall matrix in one batch of products, and one with a remainder in every tile."""
    plain, fused = pair([(6, 12), (12, 6), (35, 33)], "cpu")
    for p, q in zip(weights(plain), weights(fused), strict=True):
        plain.state[p]["momentum"].normal_()
        fused.state[q]["momentum"].copy_(plain.state[p]["momentum"])
    give_gradients(plain, fused)
    plain.step()
    fused.step()
    assert distance(plain, fused) < 1e-6


@interpreted
def test_weights_without_a_gradient_do_not_change() -> None:
    plain, fused = pair([(6, 12), (12, 6), (6, 12)], "cpu")
    give_gradients(plain, fused)
    for optimizer in (plain, fused):
        frozen = weights(optimizer)[2]
        before, frozen.grad = frozen.detach().clone(), None
        optimizer.step()
        assert torch.equal(frozen.detach(), before)
        del optimizer.state[frozen]["momentum"]
        optimizer.param_groups[0]["params"].pop()
    assert distance(plain, fused) < 1e-6


@interpreted
@pytest.mark.filterwarnings("ignore:.*encountered in")  # products of buffers that nothing was written to
def test_a_blocked_step_changes_nothing() -> None:
    _, fused = pair([(6, 12), (12, 6)], "cpu")
    before = [w.detach().clone() for w in weights(fused)]
    for w in weights(fused):
        w.grad = torch.full_like(w, torch.nan)
    fused.found_inf = torch.tensor(1.0)
    fused.step()
    for w, old in zip(weights(fused), before, strict=True):
        assert torch.equal(w.detach(), old)
        assert not fused.state[w]["momentum"].any()


def test_kernels_are_for_float32_on_a_gpu_in_one_process() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrices = [nn.Parameter(torch.zeros(64, 128, device=device))]
    assert Muon(matrices, lr=0.1)._suits_kernels() == torch.cuda.is_available()
    assert not Muon([*matrices, nn.Parameter(torch.zeros(8, 128, device=device))], lr=0.1)._suits_kernels()
    assert not Muon([nn.Parameter(matrices[0].detach().double())], lr=0.1)._suits_kernels()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 512), (2048, 512), (410, 1000), (64, 130)])
def test_compiled_kernels_are_as_close_to_float64_as_the_plain_code(shape: tuple[int, int]) -> None:
    plain, fused = pair([shape] * 3 + [shape[::-1]] * 2, "cuda")
    other = [nn.Parameter(w.detach().float()) for w in weights(plain)]
    before = [w.detach().clone() for w in weights(plain)]
    today = Muon(other, lr=0.05, momentum=0.9, weight_decay=0.1)
    today.fused = False
    give_gradients(plain, fused)
    for p, q in zip(other, weights(fused), strict=True):
        assert q.grad is not None
        p.grad = q.grad.clone()
    for optimizer in (plain, fused, today):
        optimizer.step()

    def error(optimizer: Muon) -> float:
        rows = zip(weights(optimizer), weights(plain), before, strict=True)
        return max(
            float((w.detach().double() - exact.detach()).norm() / (exact.detach() - old).norm())
            for w, exact, old in rows
        )

    assert error(fused) < min(1.2 * error(today), 2e-2)


@pytest.mark.gpu
def test_a_captured_step_reads_new_gradients_and_rates() -> None:
    plain, fused = pair([(128, 256), (256, 128), (128, 128)], "cuda")
    lr = torch.tensor(0.05, device="cuda")
    fused.param_groups[0]["lr"] = lr
    give_gradients(plain, fused)
    plain.step()
    fused.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused.step()
    plain.param_groups[0]["lr"] = 0.01
    lr.fill_(0.01)
    for p, q in zip(weights(plain), weights(fused), strict=True):
        p.grad = torch.randn_like(p)
        assert q.grad is not None
        q.grad.copy_(p.grad)
    plain.step()
    graph.replay()
    assert distance(plain, fused) < 2e-3
