"""Attention under sparse patterns against the sets of visible positions defined in the papers."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.errors import UnknownNameError
from longspan.kernels.block_attention import (
    Chunks,
    Columns,
    Distances,
    Graph,
    Pattern,
    Rows,
    Window,
    block_attention,
    flex,
    forced,
    gathered,
    reference,
)
from longspan.kernels.block_attention.dropout import PairDropout
from longspan.kernels.block_attention.plan import plans
from longspan.nn.whole_batch import Division, divided

EDGES = np.array([[[-1, -1], [0, -1], [0, 1], [2, 0], [1, 0], [4, 2], [0, 1], [1, 5], [3, 6]]])
EDGES = np.concatenate([EDGES, EDGES[:, ::-1].copy()])  # another graph for the second head

Set = Callable[[int, int, int], set[int]]
"""(h, i, n): the keys visible to query i in head h, in a document of n tokens."""


def bigbird(i: int, h: int, w: int, g: int, b: int, n: int, after: int) -> set[int]:
    """Zaheer et al. 2020, section 2: window, global and random blocks of b."""
    block = i // b
    blocks = {block + d for d in range(-w, after + 1)} | set(range(g)) | set(EDGES[h, block].tolist())
    return set(range(n)) if after and block < g else {j for j in range(n) if j // b in blocks}


CASES: dict[str, tuple[Pattern, Set]] = {
    # Child et al. 2019, section 4.3, l = 8; fixed: l = 12, c = 3
    "strided-1": (Pattern((Window(8),)), lambda h, i, n: set(range(max(0, i - 8), i + 1))),
    "strided-2": (Pattern((Window(step=8),)), lambda h, i, n: {j for j in range(i + 1) if (i - j) % 8 == 0}),
    "strided": (
        Pattern((Window(8), Window(step=8))),
        lambda h, i, n: {j for j in range(i + 1) if i - j <= 8 or (i - j) % 8 == 0},
    ),
    "fixed-1": (Pattern((Chunks(12),)), lambda h, i, n: {j for j in range(i + 1) if j // 12 == i // 12}),
    "fixed-2": (Pattern((Columns(9, 12, 12),)), lambda h, i, n: {j for j in range(i + 1) if j % 12 in (9, 10, 11)}),
    "fixed": (
        Pattern((Chunks(12), Columns(9, 12, 12))),
        lambda h, i, n: {j for j in range(i + 1) if j // 12 == i // 12 or j % 12 >= 9},
    ),
    # Beltagy et al. 2020, section 3.1: window, dilation, global tokens
    "window": (Pattern((Window(20),)), lambda h, i, n: {j for j in range(n) if 0 <= i - j <= 20}),
    "dilated": (Pattern((Window(6, 0, 3),)), lambda h, i, n: {i - 3 * k for k in range(7) if i >= 3 * k}),
    "two-sided": (
        Pattern((Window(5, 5, 2),), False),
        lambda h, i, n: {i + 2 * k for k in range(-5, 6)} & set(range(n)),
    ),
    "global": (
        Pattern((Window(7), Columns(0, 3))),
        lambda h, i, n: {j for j in range(i + 1) if i - j <= 7 or j < 3},
    ),
    "global-two-sided": (
        Pattern((Window(4, 4), Columns(0, 3)), False),
        lambda h, i, n: {j for j in range(n) if abs(i - j) <= 4 or j < 3},
    ),
    "global-rows": (Pattern((Rows(5),), False), lambda h, i, n: set(range(n)) if i < 5 else set()),
    "bigbird": (
        Pattern((Chunks(16, 2), Columns(0, 16), Graph(16, EDGES))),
        lambda h, i, n: {j for j in bigbird(i, h, 2, 1, 16, n, 0) if j <= i},
    ),
    "bigbird-two-sided": (
        Pattern((Chunks(16, 1, 1), Columns(0, 16), Rows(16), Graph(16, EDGES)), False),
        lambda h, i, n: bigbird(i, h, 1, 1, 16, n, 1),
    ),
}


def documents(L: int, rows: int = 2) -> torch.Tensor:
    """The first position of each token's document; some documents have one or a few tokens."""
    starts = torch.zeros(rows, L, dtype=torch.bool)
    for row, places in enumerate(((17, 18, 60, 100), (5, 31, 32))):
        for place in places:
            if place < L:
                starts[row, place] = True
    return torch.where(starts, torch.arange(L), 0).cummax(1).values


def visibility(sees: Set, heads: int, first: torch.Tensor) -> torch.Tensor:
    """[b, h, i, j]: whether query i may attend to key j; documents do not see each other."""
    seen = torch.zeros(first.shape[0], heads, first.shape[1], first.shape[1], dtype=torch.bool)
    for row, firsts in enumerate(first.tolist()):
        for begin in sorted(set(firsts)):
            n = firsts.count(begin)
            for i in range(n):
                for h in range(heads):
                    seen[row, h, begin + i, [begin + j for j in sorted(sees(h, i, n))]] = True
    return seen


def masked(x: list[torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
    """Plain attention in float64 with a mask; a query without visible keys gives zeros."""
    query, key, value = (tensor.double() for tensor in x)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).exp() * seen
    return weights @ value / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def draw(L: int, K: int | None = None, B: int = 2, H: int = 2, D: int = 8, **options: Any) -> list[torch.Tensor]:
    shapes = ((B, H, L, D), (B, H, K or L, D), (B, H, K or L, D))
    return [torch.randn(shape, requires_grad=True, **options) for shape in shapes]


@pytest.fixture
def _uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """The debugging mode of FlexAttention, which compiles nothing: a second instead of a minute."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("L", [1, 63, 130])
@pytest.mark.parametrize("split", [False, True], ids=["one", "documents"])
@pytest.mark.parametrize("name", CASES)
def test_implementations_equal_the_sets_of_the_papers(name: str, split: bool, L: int) -> None:
    """Outputs and gradients in float32, at lengths that are not a multiple of a block; documents are independent."""
    pattern, sees = CASES[name]
    first = documents(L) if split else torch.zeros(2, L, dtype=torch.int64)
    x = draw(L)
    expected = masked(x, visibility(sees, 2, first))
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, x, grad)
    for form in (reference, gathered):
        found = form.block_attention(*x, pattern, first_key=first if split else None)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
        for a, b in zip(torch.autograd.grad(found, x, grad.float()), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("_uncompiled_flex")
@pytest.mark.parametrize("name", ["strided", "fixed-2", "two-sided", "global-rows", "bigbird", "bigbird-two-sided"])
def test_block_masks_equal_the_sets_of_the_papers(name: str) -> None:
    """FlexAttention on a CPU (forward only, no kernel), with the block lists and mask functions used on CUDA."""
    pattern, sees = CASES[name]
    for first in (None, documents(130)):
        x = [tensor.detach() for tensor in draw(130, D=16)]
        expected = masked(x, visibility(sees, 2, torch.zeros(2, 130, dtype=torch.int64) if first is None else first))
        with forced("flex"):
            found = block_attention(*x, pattern, first_key=first)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def four_terms(x: list[torch.Tensor], d: Distances, seen: torch.Tensor) -> torch.Tensor:
    """The four terms of Dai et al. 2019, one pair of positions at a time."""
    (query, key, value), (B, H, L, D), K = x, x[0].shape, x[1].shape[2]
    far, out = d.r.shape[1] - 1 - d.ahead, []
    for b in range(B):
        for h in range(H):
            for i in range(L):
                shown = [j for j in range(K) if seen[b, h, i, j]]
                scores = []
                for j in shown:
                    steps = max(-d.ahead, min(far, math.floor((K - L + i - j) / d.step)))
                    q, k, r = query[b, h, i], key[b, h, j], d.r[h, far - steps]
                    scores.append((q @ k + q @ r + d.u[h] @ k + d.w[h] @ r) / math.sqrt(D))
                out.append(torch.stack(scores).softmax(0) @ value[b, h, shown])
    return torch.stack(out).view(B, H, L, D)


@pytest.mark.usefixtures("_uncompiled_flex")
@pytest.mark.parametrize(
    ("pattern", "sees", "memory", "ahead", "step"),
    [
        (Pattern((Window(5, 0, 2),)), lambda q, k: q - k in range(0, 11, 2), 0, 0, 2),
        (Pattern((Window(5, 0, 3),)), lambda q, k: q - k in range(0, 16, 3), 19, 0, 3),
        (Pattern((Window(5, 5),), False), lambda q, k: abs(q - k) <= 5, 0, 5, 1),
        (Pattern((Window(5), Columns(0, 2))), lambda q, k: q >= k and (q - k <= 5 or k < 2), 0, 0, 1),
        (Pattern((Window(5, 5, 2), Columns(0, 2)), False), lambda q, k: q - k in range(-10, 11, 2) or k < 2, 0, 5, 2),
    ],
    ids=["dilated", "memory", "two-sided", "global", "global-two-sided"],
)
def test_position_terms_follow_from_the_distance(pattern, sees, memory: int, ahead: int, step: int) -> None:
    L, K = 21, 21 + memory
    x = draw(L, K, dtype=torch.float64)
    position = Distances(
        *(torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True) for shape in ((2, 6 + ahead), (2,), (2,))),
        ahead,
        step,
    )
    seen = torch.tensor([[sees(memory + i, j) for j in range(K)] for i in range(L)]).expand(2, 2, L, K)
    expected = four_terms(x, position, seen)
    grad, inputs = torch.randn_like(expected), [*x, position.r, position.u, position.w]
    wanted = torch.autograd.grad(expected, inputs, grad)
    for form in (reference, gathered):
        found = form.block_attention(*x, pattern, position=position)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        for a, b in zip(torch.autograd.grad(found, inputs, grad), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    with forced("flex"), torch.no_grad():
        torch.testing.assert_close(block_attention(*x, pattern, position=position), expected, rtol=0, atol=1e-11)


@given(
    before=st.integers(0, 40),
    after=st.integers(0, 40),
    step=st.integers(1, 7),
    chunk=st.integers(1, 50),
    columns=st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(10, 30)),
    causal=st.booleans(),
    L=st.integers(1, 90),
    starts=st.lists(st.integers(0, 89), max_size=3),
)
def test_skipped_blocks_contain_no_visible_key(before, after, step, chunk, columns, causal, L, starts) -> None:
    begin, count, size = columns
    parts = (Window(before, after, step), Chunks(chunk, 1), Columns(begin, begin + count, size), Rows(chunk))
    x, first = draw(L, B=1, H=1, dtype=torch.float64), torch.zeros(1, L, dtype=torch.int64)
    for place in sorted(starts):
        first[0, place:] = place
    for chosen in (parts, parts[2:] + parts[:1]):
        for first_key in (None, first):
            pattern = Pattern(chosen, causal)
            expected = reference.block_attention(*x, pattern, first_key=first_key)
            found = gathered.block_attention(*x, pattern, first_key=first_key)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern((Window(63),)),
        Pattern((Window(31, 0, 4),)),
        Pattern((Window(31, 31), Columns(0, 8)), False),
        Pattern((Rows(8),), False),
        Pattern((Chunks(32, 1, 1), Columns(0, 32), Rows(32)), False),
    ],
    ids=["window", "dilated", "global", "rows", "blocks"],
)
def test_memory_grows_linearly_with_the_length(pattern: Pattern) -> None:
    """Forward and backward, with positions: at twice the length, the largest tensor has twice the elements."""
    sizes = []
    for L in (1024, 2048):
        x = draw(L, B=1, H=1)
        position = Distances(torch.randn(1, 64, 8), torch.randn(1, 8), torch.randn(1, 8), 31, 1)
        with Largest() as largest:
            gathered.block_attention(*x, pattern, position=position).sum().backward()
        sizes.append(largest.elements)
    assert sizes[1] <= 2.05 * sizes[0], sizes
    assert sizes[1] < 2048 * 2048 / 8, sizes


def test_strided_patterns_cost_the_length_times_its_square_root() -> None:
    """With l = sqrt(L), no operation makes more than about 2 L sqrt(L) scores."""
    for parts in (lambda s: (Window(s),), lambda s: (Window(step=s),), lambda s: (Columns(s - 1, s, s),)):
        for L, stride in ((1024, 32), (4096, 64)):
            x = draw(L, B=1, H=1, D=2)
            with Largest() as largest:
                gathered.block_attention(*x, Pattern(parts(stride))).sum().backward()
            assert largest.elements <= 2.1 * L * stride, (L, largest.elements)


@pytest.mark.parametrize("name", ["window", "dilated", "global", "bigbird"])
def test_the_number_of_visited_blocks_grows_linearly_with_the_length(name: str) -> None:
    pattern = CASES[name][0]
    counts = []
    for L in (2048, 4096):
        made = plans(pattern, 2, L, L, torch.device("cpu"), None, 128)
        counts.append(sum(int((plan.visits[0, 0] >= 0).sum()) for plan in made))
    assert counts[1] <= 2 * counts[0] + 2, counts
    assert counts[1] <= 32 * 5


def test_dropout_drops_attention_weights_and_keeps_their_mean() -> None:
    """With one-hot values the output is the attention weights."""
    query, key, _ = (tensor.detach() for tensor in draw(16, B=64, D=16))
    value = torch.eye(16).expand(64, 2, 16, 16)
    pattern = Pattern((Window(5), Columns(0, 2)))
    kept = block_attention(query, key, value, pattern)
    ratio = (block_attention(query, key, value, pattern, dropout=0.25) / kept)[kept > 1e-6]
    torch.testing.assert_close(ratio[ratio != 0], torch.full_like(ratio[ratio != 0], 1 / 0.75), rtol=1e-4, atol=0)
    assert abs(float((ratio == 0).float().mean()) - 0.25) < 0.02


@pytest.mark.parametrize("documents", [False, True])
def test_dropout_depends_on_positions_and_not_on_the_layout(documents: bool) -> None:
    """Every form drops the same pairs, and so does a batch of some of the rows."""
    L = 37
    query, key, value = (tensor.detach() for tensor in draw(L, B=4, D=16))
    first_key = None
    if documents:
        starts = [[0], [0, 11], [0, 5, 30], [0, 36]]
        first_key = torch.stack([torch.tensor([max(s for s in row if s <= i) for i in range(L)]) for row in starts])
    for pattern in (Pattern((Window(5), Columns(0, 2))), Pattern((Chunks(6), Columns(4, 2)))):
        found = []
        for form in ("reference", "gathered"):
            torch.manual_seed(3)
            with forced(form):
                found.append(block_attention(query, key, value, pattern, first_key=first_key, dropout=0.3))
        torch.testing.assert_close(found[0], found[1])
        torch.manual_seed(3)
        some = None if first_key is None else first_key[2:]
        with divided(Division(1, 2, None, True)):
            part = block_attention(query[2:], key[2:], value[2:], pattern, first_key=some, dropout=0.3)
        torch.testing.assert_close(found[1][2:], part)


def test_dropped_pairs_are_independent() -> None:
    """Two weights that differ in row, head, query or key are both dropped with probability rate squared."""
    place = torch.arange(64)
    weights = torch.ones(16, 4, 64, 64)
    kept = PairDropout(0.5, weights)(weights, place[:, None], place)
    dropped = kept == 0
    assert abs(float(dropped.float().mean()) - 0.5) < 0.005
    for axis in range(4):
        both = dropped & dropped.roll(1, axis)
        assert abs(float(both.float().mean()) - 0.25) < 0.005
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 2.0]))


def test_a_plan_cached_in_inference_mode_can_be_used_in_training() -> None:
    """Cached tensors are made outside inference mode, so that autograd can save them."""
    pattern, x = Pattern((Window(step=3), Columns(0, 2))), draw(40)
    with torch.inference_mode():
        scored = block_attention(*x, pattern, first_key=documents(40))
        block_attention(*x, pattern)
    output = block_attention(*x, pattern, first_key=documents(40))
    output.sum().backward()
    assert torch.equal(output, scored)
    block_attention(*x, pattern).sum().backward()


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"'gatherd'.*'gathered'"), forced("gatherd"):
        pass


GPU_CASES = ["strided", "fixed", "fixed-2", "dilated", "two-sided", "global-two-sided", "bigbird", "bigbird-two-sided"]


def test_the_mask_function_of_a_new_pattern_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask function must not create the tensors it uses while it is compiled. Dynamo traces it on a CPU as on
    CUDA."""
    compiled = torch.compile(flex.flex_attention, backend="eager", fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "flex_attention", compiled)
    parts = CASES["bigbird"][0].parts
    x = [tensor.detach() for tensor in draw(130, D=16)]
    fresh = Pattern((*parts[:-1], Graph(16, EDGES)))
    torch.testing.assert_close(flex.block_attention(*x, fresh), reference.block_attention(*x, Pattern(parts)))


@pytest.mark.gpu
@pytest.mark.parametrize(("split", "positions"), [(False, False), (True, True)], ids=["plain", "documents-positions"])
@pytest.mark.parametrize("name", GPU_CASES)
def test_flex_on_cuda_equals_the_reference(name: str, split: bool, positions: bool) -> None:
    """Outputs and every gradient of the compiled kernels, at a length that is not a multiple of a block."""
    pattern, L = CASES[name][0], 130
    first = documents(L).cuda() if split else None
    x = draw(L, D=32, device="cuda")
    inputs, position = list(x), None
    if positions:
        ahead = 0 if pattern.causal else 5
        terms = [torch.randn(*s, 32, device="cuda", requires_grad=True) for s in ((2, 9 + ahead), (2,), (2,))]
        position, inputs = Distances(*terms, ahead, getattr(pattern.parts[0], "step", 1)), [*x, *terms]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = None if position is None else Distances(*wide[3:], position.ahead, position.step)
    expected = reference.block_attention(*wide[:3], pattern, first_key=first, position=exact)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, wide, grad)
    with forced("flex"):
        found = block_attention(*x, pattern, first_key=first, position=position)
    assert (found.double() - expected).norm() < 1e-4 * expected.norm()
    for a, b in zip(torch.autograd.grad(found, inputs, grad.float()), wanted, strict=True):
        assert (a.double() - b).norm() < 1e-3 * b.norm().clamp(min=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["strided", "fixed", "global", "bigbird"])
def test_bfloat16_is_close_to_the_reference(name: str) -> None:
    """Also for the gathered implementation, which is used on CUDA where FlexAttention has no kernel."""
    pattern = CASES[name][0]
    x = [tensor.detach().bfloat16() for tensor in draw(130, D=64, device="cuda")]
    expected = reference.block_attention(*(tensor.double() for tensor in x), pattern)
    for form in ("flex", "gathered"):
        with forced(form):
            found = block_attention(*x, pattern)
        assert (found.double() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.gpu
def test_flex_works_with_many_windows_inside_compiled_code() -> None:
    """More patterns than torch's limit on compilations, each called from inside a compiled function."""
    x = draw(300, D=32, device="cuda")
    patterns = [Pattern((Window(16 * n, 0, 1 + n % 3),)) for n in range(1, 13)]

    def attend(pattern: Pattern) -> torch.Tensor:
        return block_attention(x[0] * 2, x[1], x[2], pattern).sin()

    compiled = torch.compile(attend, dynamic=False)
    for pattern in patterns:
        expected = reference.block_attention(x[0] * 2, x[1], x[2], pattern).sin()
        torch.testing.assert_close(compiled(pattern), expected, rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_flex_allocates_no_matrix_of_all_scores() -> None:
    """Peak memory of a window, forward and backward, doubles with the length; all scores of 16k tokens would need 1
    GiB."""
    peaks = []
    for L in (8192, 16384):
        x = [tensor.detach().bfloat16().requires_grad_() for tensor in draw(L, B=1, H=1, D=64, device="cuda")]
        pattern = Pattern((Window(255),))
        for _ in range(2):  # the first call compiles
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            block_attention(*x, pattern).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.5 * peaks[0]
    assert peaks[1] < 2**28
