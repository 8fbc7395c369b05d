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


def test_bfloat16_copies_follow_their_weights() -> None:
    """A gradient in bfloat16 gives the update that the same numbers give in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shapes = [(BLOCK + 5,), (3, 7)]
    weights = [torch.randn(shape, device=device) for shape in shapes]
    copies = [weights[0].bfloat16(), None]
    plain = [weight.clone() for weight in weights]
    squares, plain_squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    update = RMSUpdate(weights, [w.clone() for w in weights], squares, copies)
    other = RMSUpdate(plain, [w.clone() for w in plain], plain_squares)
    for step in (1, 2):
        gradients = [torch.randn_like(w) for w in weights]
        gradients[0] = gradients[0].bfloat16()
        given = torch.tensor(float(step), device=device), RATE, 0.1, EPSILON
        update(gradients, *given)
        other([gradient.float() for gradient in gradients], *given)
    for got, want in zip([*weights, *squares], [*plain, *plain_squares], strict=True):
        assert torch.equal(got, want)
    assert copies[0] is not None
    # The interpreter truncates instead of rounding.
    apart = (copies[0].double() - weights[0].double()).abs() / weights[0].double().abs()
    assert apart.max() <= (2**-8 if device == "cuda" else 2**-7)
    assert torch.equal(copies[0], weights[0].bfloat16()) or device == "cpu"
