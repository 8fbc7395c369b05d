"""The kernel of dynamic evaluation's update against its formula in float64."""

import pytest
import torch

from longspan.kernels.rms_update import BLOCK, RMSUpdate

pytest.importorskip("triton")
RATE, EPSILON = 0.01, 1e-8


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_one_launch_updates_every_tensor(decay: float) -> None:
    """Three tensors, one of them longer than a block; two updates."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shapes = [(BLOCK + 5,), (3, 7), (1,)]
    weights, original = ([torch.randn(shape, device=device) for shape in shapes] for _ in range(2))
    squares = [torch.zeros_like(w) for w in weights]
    update = RMSUpdate(weights, original, squares)
    exact, total = [w.double() for w in weights], [s.double() for s in squares]
    for step in (1, 2):
        gradients = [torch.randn_like(w) for w in weights]
        update(gradients, torch.tensor(float(step), device=device), RATE, decay, EPSILON)
        for k, g in enumerate(gradients):
            total[k] += g.double() ** 2
            pulled = exact[k] + decay * (original[k].double() - exact[k])
            exact[k] = pulled - RATE * g.double() / ((total[k] / step).sqrt() + EPSILON)
    for got, want in zip([*weights, *squares], [*exact, *total], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_the_kernel_is_for_float32_on_a_gpu() -> None:
    assert not RMSUpdate.suits([torch.zeros(3)])
    if torch.cuda.is_available():
        assert RMSUpdate.suits([torch.zeros(3, device="cuda")])
        assert not RMSUpdate.suits([torch.zeros(3, device="cuda", dtype=torch.float64)])
