"""The fused kernels against the reference in float64: outputs and every gradient, at lengths that are not a multiple of
a tile.

Without a GPU the kernels run in Triton's interpreter (conftest.py).
"""

import pytest
import torch

from longspan.kernels.relative_attention import fused, reference, split

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
NAMES = ("query", "key", "value", "distance", "u", "w")


def draw(B: int, H: int, L: int, M: int, D: int, C: int | None, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random inputs; queries and keys have the memory layout of a projection, with interleaved heads."""
    K = M + L

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    tensors = [randn(B, L, H, D).transpose(1, 2), randn(B, K, H, D).transpose(1, 2), randn(B, H, K, D)]
    return [*tensors, randn(H, C or K, D), randn(H, D), randn(H, D)]


def documents(B: int, L: int, M: int, device: str) -> torch.Tensor:
    """A non-decreasing oldest key per query, never later than the query itself."""
    drawn = torch.randint(0, M + L, (B, L), device=device).sort(1).values
    return torch.minimum(drawn, torch.arange(M, M + L, device=device))


def assert_close_to_reference(
    tensors: list[torch.Tensor],
    bound: float,
    window: int | None = None,
    first_key: torch.Tensor | None = None,
    discount: float = 0.0,
) -> None:
    ours = [tensor.detach().requires_grad_() for tensor in tensors]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out = fused.relative_attention(*ours, window=window, first_key=first_key, discount=discount)
    wanted = reference.relative_attention(*exact, window=window, first_key=first_key, discount=discount)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    pairs = [("out", out.detach(), wanted.detach())]
    pairs += [(name, a.grad, b.grad) for name, a, b in zip(NAMES, ours, exact, strict=True)]
    for name, got, want in pairs:
        assert got is not None
        assert want is not None
        # A query with a single key gives it weight 1 whatever its score, so gradients of scores are exactly zero.
        distance = (got.double() - want).norm() / want.norm().clamp_min(want.numel() ** 0.5 * 0.1)
        assert distance < bound, f"{name} is off by {distance:.1e}"


@interpreted
@pytest.mark.parametrize(
    ("B", "H", "L", "M", "D", "C", "window", "resets"),
    [
        (1, 2, 1, 0, 32, None, None, False),
        (2, 1, 17, 7, 32, None, None, False),
        (1, 1, 33, 40, 41, 30, 45, True),
        (1, 1, 17, 40, 16, 13, None, False),
        pytest.param(1, 2, 20, 50, 16, 13, None, True, marks=pytest.mark.torture),
        (1, 1, 37, 50, 16, None, 20, False),
    ],
)
def test_interpreted_kernels_equal_the_reference(
    B: int, H: int, L: int, M: int, D: int, C: int | None, window: int | None, resets: bool
) -> None:
    tensors = draw(B, H, L, M, D, C, "cpu", torch.float32)
    first_key = documents(B, L, M, "cpu") if resets else None
    assert_close_to_reference(tensors, 2e-6, window, first_key)
    if C is not None:  # beyond the table
        assert window is None or window > C, "no visible key is beyond the table"
        assert_close_to_reference(tensors, 2e-6, window, first_key, discount=2.0)


def assert_exact_for_large_scores(device: str, dtype: torch.dtype, L: int, M: int, D: int) -> None:
    """Scores of thousands that differ by a few: if the backward pass rounds q + u differently from the forward pass,
    the weights from which it computes the gradients of keys and values are off by factors."""
    tensors = draw(1, 2, L, M, D, None, device, dtype)
    for tensor, size, mean in zip(tensors, (1, 0.02, 1, 0.02, 20, 20), (50, 50, 0, 0, 0, 0), strict=True):
        tensor.mul_(size).add_(mean)
    ours, exact = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    out = fused.relative_attention(*ours)

    query, key, value, distance, u, w = exact
    none = torch.zeros_like(u).double()
    terms = ((query + u[:, None], key, distance * 0), (query + w[:, None], key * 0, distance))
    content, position = (reference.relative_scores(*(part.double() for part in term), none, none) for term in terms)
    scores = ((content + position) / D**0.5).masked_fill(reference.distances(L, M + L, out.device) < 0, float("-inf"))
    assert scores.max() > 10_000
    wanted = scores.softmax(-1) @ value.double()

    grad = torch.randn_like(out)
    of_key, of_value = torch.autograd.grad(out, ours[1:3], grad)
    assert_near(of_key, torch.autograd.grad(wanted, key, grad.double(), retain_graph=True)[0])
    assert_near(of_value, torch.autograd.grad(wanted, value, grad.double())[0])


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    off = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert off < 0.02, f"off by {off:.1e}"


@interpreted
def test_gradients_of_large_scores() -> None:
    assert_exact_for_large_scores("cpu", torch.float16, 20, 12, 32)


@pytest.mark.gpu
@pytest.mark.parametrize(("L", "M", "D"), [(70, 70, 64), (200, 300, 128)])
def test_gradients_of_large_scores_on_a_gpu(L: int, M: int, D: int) -> None:
    assert_exact_for_large_scores("cuda", torch.bfloat16, L, M, D)


@interpreted
def test_eager_calls_equal_the_custom_operation() -> None:
    """Compiled models use the operation; eager calls skip it. Both refuse a second derivative."""
    tensors = [tensor.requires_grad_() for tensor in draw(1, 2, 5, 6, 16, None, "cpu", torch.float32)]
    eager = fused.relative_attention(*tensors, window=8)
    operation = fused._forward(*tensors, None, None, 8, 0.0, 0.0)[0]
    assert torch.equal(eager, operation)
    grad = torch.randn_like(eager)
    for ours, theirs in zip(
        torch.autograd.grad(eager, tensors, grad), torch.autograd.grad(operation, tensors, grad), strict=True
    ):
        assert torch.equal(ours, theirs)
    for function in (fused.relative_attention, lambda *some: fused._forward(*some, None, None, 0, 0.0, 0.0)[0]):
        (first,) = torch.autograd.grad(function(*tensors).sum(), tensors[0], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            first.sum().backward()


def use_forward(monkeypatch: pytest.MonkeyPatch, how: fused.Launch) -> None:
    launch = fused.launch
    monkeypatch.setattr(
        fused, "launch", lambda kernel, *a, **b: how if kernel == "forward" else launch(kernel, *a, **b)
    )


@interpreted
@pytest.mark.parametrize(
    ("L", "D", "ahead", "table"),
    [(33, 16, True, False), (16, 16, True, True), (16, 16, False, True), (17, 80, True, False)],
)
def test_interpreted_forms_of_the_forward_kernel(
    L: int, D: int, ahead: bool, table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the reference, and with dropout and a discount against the form without both options. With a table, keys,
    values and position keys are loaded with descriptors."""
    tensors = draw(1, 1, L, 29, D, 30, "cpu", torch.float32)
    first_key = documents(1, L, 29, "cpu")
    wanted = reference.relative_attention(*(tensor.double() for tensor in tensors), window=23, first_key=first_key)
    same = fused.relative_attention(*tensors, dropout=0.25, discount=2.0, seed=3)
    use_forward(monkeypatch, fused.Launch(16, 4, 1, fused.GATHER, ahead=ahead, table=table))
    if table:
        monkeypatch.setattr(fused, "HALF", fused.GATHER)  # the form that has descriptors
    out = fused.relative_attention(*tensors, window=23, first_key=first_key)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(fused.relative_attention(*tensors, dropout=0.25, discount=2.0, seed=3), same)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("L", "M"), [(1, 0), (63, 2100), (513, 512), (500, 7)])
@pytest.mark.parametrize(
    ("D", "how"),
    [
        (64, fused.Launch(64, 4, 2, fused.HALF, 168)),
        (64, fused.Launch(64, 4, 2, fused.HALF, 168, ahead=True)),
        (64, fused.Launch(64, 4, 2, fused.BLOCK)),
        (128, fused.Launch(64, 4, 2, fused.WARP)),
        (128, fused.Launch(64, 4, 2, fused.STILL, ahead=True)),
        (128, fused.Launch(64, 4, 2, fused.STILL)),
    ],
    ids=["in-turn", "ahead", "block", "wide-warp", "wide-still", "wide-in-turn"],
)
def test_forms_of_the_forward_kernel(
    D: int, how: fused.Launch, L: int, M: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_forward(monkeypatch, how)
    with split.using(1):
        assert_close_to_reference(draw(2, 2, L, M, D, None, "cuda", torch.bfloat16), 1e-2, window)


@interpreted
def test_the_backward_pass_drops_the_same_weights() -> None:
    """One seed always drops the same weights, and the gradient agrees with a finite difference."""
    tensors = draw(1, 1, 5, 6, 16, None, "cpu", torch.float32)
    query = tensors[0].detach().requires_grad_()

    def run(query: torch.Tensor) -> torch.Tensor:
        return fused.relative_attention(query, *tensors[1:], dropout=0.5, seed=7)

    direction, grad = torch.randn_like(query), torch.randn_like(query)
    (gradient,) = torch.autograd.grad(run(query), query, grad)
    step = 1e-2
    change = ((run(query + step * direction) - run(query - step * direction)) * grad).sum() / (2 * step)
    assert torch.equal(run(query), run(query))
    assert not torch.equal(run(query), fused.relative_attention(*tensors))
    torch.testing.assert_close((gradient * direction).sum(), change.detach(), rtol=2e-2, atol=1e-3)


def dropped(B: int, H: int, L: int, rate: float, seed: int) -> torch.Tensor:
    """Which weights are dropped, [B, H, L, L]. All scores are equal and values are unit vectors, so the output shows
    it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    zeros = torch.zeros(B, H, L, L, device=device)
    values = torch.eye(L, device=device).expand(B, H, L, L).contiguous()
    rest = (torch.zeros(H, L, L, device=device), torch.zeros(H, L, device=device), torch.zeros(H, L, device=device))
    return fused.relative_attention(zeros, zeros, values, *rest, dropout=rate, seed=seed) == 0


def test_dropout_masks_are_statistically_independent() -> None:
    """The rate, and correlations between neighbours, rows of the batch, heads and seeds, are within five standard
    deviations."""
    B, H, L, rate = 2, 2, 48, 0.25
    seen = torch.ones(L, L, dtype=torch.bool).tril()
    masks = torch.stack([dropped(B, H, L, rate, seed).cpu() for seed in (1, 2, 12345)])
    assert abs(masks[..., seen].double().mean() - rate) < 5 * (rate * (1 - rate) / masks[..., seen].numel()) ** 0.5
    signs = torch.where(masks, rate - 1, rate).double() / (rate * (1 - rate)) ** 0.5 * seen

    def correlation(a: torch.Tensor, b: torch.Tensor, both: torch.Tensor) -> float:
        return float((a * b).sum() / (both.sum() * (a.numel() // both.numel())) ** 0.5)

    below, beside = seen[1:] & seen[:-1], seen[:, 1:] & seen[:, :-1]
    found = {
        "queries": correlation(signs[..., 1:, :], signs[..., :-1, :], below),
        "keys": correlation(signs[..., 1:], signs[..., :-1], beside),
        "heads": correlation(signs[:, :, 1:], signs[:, :, :-1], seen),
        "rows": correlation(signs[:, 1:], signs[:, :-1], seen),
        "seeds": correlation(signs[1:], signs[:-1], seen),
    }
    assert max(map(abs, found.values())) < 5, found
    assert len({mask.numpy().tobytes() for mask in masks.flatten(0, 2)[:, seen]}) == masks.flatten(0, 2).shape[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M", [0, 7, 512, 2100])
@pytest.mark.parametrize("L", [1, 63, 500, 513])
def test_lengths_that_are_no_multiple_of_a_tile(L: int, M: int, dtype: torch.dtype) -> None:
    assert_close_to_reference(draw(2, 2, L, M, 64, None, "cuda", dtype), 1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [32, 41, 64, 80, 128])
def test_all_options_at_all_head_widths(D: int) -> None:
    L, M = 130, 700
    tensors = draw(2, 2, L, M, D, 300, "cuda", torch.bfloat16)
    assert_close_to_reference(tensors, 1e-2, window=500)
    assert_close_to_reference(tensors, 1e-2, window=500, discount=2.0)
    assert_close_to_reference(tensors, 1e-2, first_key=documents(2, L, M, "cuda"))


@pytest.mark.gpu
def test_position_scores_beyond_float16_stay_finite() -> None:
    query, key, value, distance, u, w = draw(1, 2, 128, 128, 64, None, "cuda", torch.bfloat16)
    out = fused.relative_attention(query * 1000, key, value, distance * 1000, u, w)
    assert out.isfinite().all()


@pytest.mark.gpu
def test_dropout_keeps_the_mean_and_the_seed() -> None:
    tensors = draw(8, 4, 256, 256, 64, None, "cuda", torch.bfloat16)
    without = fused.relative_attention(*tensors)
    dropped = [fused.relative_attention(*tensors, dropout=0.1, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[0], dropped[2])
    mean = torch.stack([fused.relative_attention(*tensors, dropout=0.1, seed=s).float() for s in range(64)]).mean(0)
    assert ((mean - without.float()).norm() / without.float().norm()) < 0.1


@pytest.mark.gpu
def test_it_compiles_without_a_graph_break() -> None:
    tensors = [tensor.requires_grad_() for tensor in draw(1, 2, 64, 64, 64, None, "cuda", torch.bfloat16)]
    compiled = torch.compile(fused.relative_attention, fullgraph=True)
    grad = torch.randn_like(tensors[0])
    plain = torch.autograd.grad(fused.relative_attention(*tensors), tensors, grad)
    again = torch.autograd.grad(compiled(*tensors), tensors, grad)
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
