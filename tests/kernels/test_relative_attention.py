"""The reference against loops in plain Python, and the other implementations in torch against the reference."""

import math
from pathlib import Path

import pytest
import torch

from longspan.errors import UnknownNameError
from longspan.kernels.causal_attention import causal_attention
from longspan.kernels.relative_attention import forced, reference, relative_attention, skewed
from longspan.kernels.triton_works import has_compiler

Inputs = dict[str, torch.Tensor]


def inputs(B: int, H: int, L: int, M: int, D: int, C: int | None = None, dtype=torch.float64) -> Inputs:
    K = L + M
    shapes = {"query": (B, H, L, D), "key": (B, H, K, D), "value": (B, H, K, D)}
    shapes |= {"distance": (H, C or K, D), "u": (H, D), "w": (H, D)}
    return {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}


def four_terms(x: Inputs, window: int | None, first_key: torch.Tensor | None, discount: float = 0.0) -> torch.Tensor:
    """Every score separately, as the sum of the four terms of the paper."""
    x = {name: tensor.detach() for name, tensor in x.items()}
    (B, H, L, D), K, C = x["query"].shape, x["key"].shape[2], x["distance"].shape[1]
    out = torch.zeros(B, H, L, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(L):
                scores = {}
                for j in range(K):
                    gap = K - L + i - j
                    if gap < 0 or (window is not None and gap >= window):
                        continue
                    if first_key is not None and j < first_key[b, i]:
                        continue
                    q, k, r = x["query"][b, h, i], x["key"][b, h, j], x["distance"][h, C - 1 - min(gap, C - 1)]
                    terms = (q @ k, q @ r, x["u"][h] @ k, x["w"][h] @ r)
                    scores[j] = float(sum(terms)) / math.sqrt(D)
                    if gap > C - 1:
                        scores[j] -= discount * math.log(gap / (C - 1))
                total = sum(math.exp(s) for s in scores.values())
                for j, s in scores.items():
                    out[b, h, i] += math.exp(s) / total * x["value"][b, h, j]
    return out


CASES = [(5, 0, None, None), (4, 6, None, None), (4, 6, 3, None), (1, 5, None, 4), (6, 3, 20, 5), (3, 7, 4, 6)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("L", "M", "C", "window"), CASES)
def test_the_reference_equals_the_four_terms_of_the_paper(
    L: int, M: int, C: int | None, window: int | None, documents: bool
) -> None:
    x = inputs(2, 2, L, M, 4, C)
    first = torch.randint(0, M + 1, (2, L)).cummax(1).values if documents else None
    for discount in (0.0, 1.5):
        expected = four_terms(x, window, first, discount)
        found = reference.relative_attention(**x, window=window, first_key=first, discount=discount)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("beyond", "window"), [(0, None), (1, None), (1, 9), (1, 8)])
def test_a_discount_applies_from_the_first_key_beyond_the_table(beyond: int, window: int | None) -> None:
    """The dispatcher leaves the discount out where no visible key is beyond the table."""
    x = inputs(1, 2, 3, 5 + beyond, 4, C=8)
    expected = reference.relative_attention(**x, window=window, discount=2.0)
    torch.testing.assert_close(relative_attention(**x, window=window, discount=2.0), expected, rtol=0, atol=1e-11)
    without = reference.relative_attention(**x, window=window)
    assert torch.equal(expected, without) == (beyond == 0 or window == 8)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("L", [1, 63, 130])
@pytest.mark.parametrize("M", [0, 7, 100])
@pytest.mark.parametrize(("C", "window"), [(None, None), (40, None), (None, 7), (5, 30), (500, 500)])
def test_skewed_equals_the_reference(
    L: int, M: int, C: int | None, window: int | None, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and all gradients in float64; also the separate path without gradients, and segments computed in
    blocks."""
    x = inputs(2, 2, L, M, 8, C)
    first = torch.randint(0, M + 1, (2, L)).cummax(1).values if documents else None
    expected = reference.relative_attention(**x, window=window, first_key=first, discount=2.0)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, list(x.values()), grad)
    for together in (skewed.BLOCK_QUERIES, 17):
        monkeypatch.setattr(skewed, "BLOCK_QUERIES", together)
        found = skewed.relative_attention(**x, window=window, first_key=first, discount=2.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        for name, a, b in zip(x, torch.autograd.grad(found, list(x.values()), grad), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)
        with torch.no_grad():
            output = skewed.relative_attention(**x, window=window, first_key=first, discount=2.0)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-11)


def test_a_long_segment_is_computed_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has few rows of scores, and only the keys that one of its queries sees."""
    made: list[tuple[int, int]] = []

    def recorded(query: torch.Tensor, distance: torch.Tensor, keys: int, *more: object) -> torch.Tensor:
        made.append((query.shape[2], keys))
        return scores(query, distance, keys, *more)  # type: ignore[arg-type]

    scores = skewed.position_scores
    monkeypatch.setattr(skewed, "position_scores", recorded)
    T = skewed.BLOCK_QUERIES
    _without_gradients(inputs(1, 1, 3 * T + 5, 7, 4))
    assert made == [(T, T + 7), (T, 2 * T + 7), (T, 3 * T + 7), (5, 3 * T + 12)]
    made.clear()
    _without_gradients(inputs(1, 1, 2 * T, 3 * T, 4), window=3 * T)
    assert made == [(T, 4 * T - 1), (T, 4 * T - 1)]


@pytest.mark.parametrize("L", [1, 63, 500, 513])
@pytest.mark.parametrize("M", [0, 7, 512, 2100])
def test_skewed_in_float32_at_many_lengths(L: int, M: int) -> None:
    """Outputs and all gradients against the reference in float64."""
    x = inputs(1, 1, L, M, 64, dtype=torch.float32)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in x.items()}
    expected, found = reference.relative_attention(**exact), skewed.relative_attention(**x)
    grad = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, list(exact.values()), grad.double())
    got = torch.autograd.grad(found, list(x.values()), grad)
    for name, a, b in (
        ("out", found, expected),
        ("no_grad", _without_gradients(x), expected),
        *zip(x, got, wanted, strict=True),
    ):
        # A query with a single key gives it weight 1 whatever its score, so gradients of scores are exactly zero.
        assert (a.double() - b).norm() / b.norm().clamp_min(b.numel() ** 0.5 * 0.1) < 2e-6, name


def _without_gradients(x: Inputs, window: int | None = None) -> torch.Tensor:
    with torch.no_grad():
        return skewed.relative_attention(**x, window=window)


def test_position_scores_are_a_strided_view_with_a_causal_mask() -> None:
    """No [L, K] mask and no gather: the shifted matrix is the same buffer with another stride."""
    x = inputs(1, 2, 6, 4, 8)
    shifted = skewed.position_scores(x["query"].detach(), x["distance"].detach(), 10)
    assert shifted.stride(-2) == 10 + 6 - 1 - 1
    gap = reference.distances(6, 10, shifted.device)
    assert torch.equal(shifted[0, 0] == -math.inf, gap < 0)


@pytest.mark.parametrize("form", ["reference", "skewed"])
def test_dropout_drops_attention_weights_and_keeps_their_mean(form: str) -> None:
    """With one-hot values the output is the attention weights."""
    torch.manual_seed(3)
    x = {name: tensor.detach().float() for name, tensor in inputs(64, 2, 8, 8, 16).items()}
    x["value"] = torch.eye(16).expand(64, 2, 16, 16).contiguous()
    with forced(form):
        kept, dropped = relative_attention(**x), relative_attention(**x, dropout=0.25)
    ratio = (dropped / kept)[kept > 1e-6]
    torch.testing.assert_close(ratio[ratio != 0], torch.full_like(ratio[ratio != 0], 1 / 0.75), rtol=1e-4, atol=0)
    assert abs(float((ratio == 0).float().mean()) - 0.25) < 0.01


def test_triton_is_not_used_without_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not has_compiler()
    (tmp_path / "mycc").touch(mode=0o755)
    for named, there in (("mycc -O2", True), ("nowhere/cc", False), (str(tmp_path / "mycc"), True)):
        monkeypatch.setenv("CC", named)
        assert has_compiler() == there


def test_an_implementation_can_be_forced_and_an_unknown_one_is_refused() -> None:
    x = inputs(1, 1, 3, 2, 4)
    with forced("reference"):
        a = relative_attention(**x)
    torch.testing.assert_close(a, relative_attention(**x), rtol=0, atol=1e-12)
    with pytest.raises(UnknownNameError, match=r"'skewd'.*'skewed'"), forced("skewd"):
        pass


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("L", "M", "window"), [(7, 0, None), (5, 6, None), (5, 6, 4), (1, 9, 3)])
def test_causal_attention_equals_relative_attention_without_positions(L, M, window, documents) -> None:
    x = inputs(2, 2, L, M, 8)
    first = torch.randint(0, M + 1, (2, L)).cummax(1).values if documents else None
    zeros = {name: torch.zeros_like(x[name]) for name in ("distance", "u", "w")}
    expected = reference.relative_attention(**{**x, **zeros}, window=window, first_key=first)
    found = causal_attention(x["query"], x["key"], x["value"], window=window, first_key=first)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
