"""Hashed attention against a loop over the sets of the paper, and against full attention with a single bucket."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.kernels.lsh_attention import hash_buckets, lsh_attention


def loop(query, value, bucket, chunk):
    """P_i of the paper: the union over rounds of the last `chunk` earlier positions in the bucket of i."""
    B, H, L, _ = query.shape
    rows = []
    for b in range(B):
        for h in range(H):
            for i in range(L):
                seen = set()
                for row in bucket[b, h].tolist():
                    seen |= set([j for j in range(i) if row[j] == row[i]][-chunk:])
                seen = sorted(seen) or [i]
                keys = query[b, h, seen] / query[b, h, seen].norm(dim=-1, keepdim=True)
                rows.append((keys @ query[b, h, i]).softmax(0) @ value[b, h, seen])
    return torch.stack(rows).view(query.shape)


@given(
    length=st.integers(1, 29),
    chunk=st.integers(1, 11),
    rounds=st.integers(1, 4),
    buckets=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_it_equals_a_loop_over_the_sets_of_the_paper(
    length: int, chunk: int, rounds: int, buckets: int, seed: int
) -> None:
    """Keys found in several rounds count once; a position without other keys attends to itself. Gradients as well."""
    draw = torch.Generator().manual_seed(seed)
    query, value, weight = (
        torch.randn(2, 2, length, 3, generator=draw, dtype=torch.float64).requires_grad_(k < 2) for k in range(3)
    )
    bucket = torch.randint(buckets, (2, 2, rounds, length), generator=draw)
    found, expected = lsh_attention(query, value, bucket, chunk=chunk), loop(query, value, bucket, chunk)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), (query, value)),
        torch.autograd.grad((expected * weight).sum(), (query, value), allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("length", [1, 63, 100])
def test_one_bucket_equals_full_attention(length: int, rounds: int) -> None:
    """torch's attention with shared queries and keys and a causal mask without the diagonal, except for the first
    token."""
    query, value = torch.randn(2, 4, length, 16), torch.randn(2, 4, length, 16)
    bucket = hash_buckets(query, torch.randn(rounds, 16, 0), ())
    found = lsh_attention(query, value, bucket, chunk=length)
    seen = torch.ones(length, length).tril(-1).bool()
    seen[0, 0] = True
    key = query / query.norm(dim=-1, keepdim=True)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_dropout_keeps_the_mean() -> None:
    query, value = torch.randn(1, 1, 12, 4), torch.ones(1, 1, 12, 4)
    bucket = torch.zeros(1, 1, 1, 12, dtype=torch.int64)
    outputs = torch.stack([lsh_attention(query, value, bucket, chunk=12, dropout=0.5) for _ in range(400)])
    assert outputs.std(0).max() > 0.1
    torch.testing.assert_close(outputs.mean(0), value, rtol=0, atol=0.3)


def test_a_bucket_is_the_nearest_axis() -> None:
    """With R = I the buckets 0 to 3 are +x, +y, -x, -y; two factors give two digits."""
    vectors = torch.tensor([[3.0, 1.0], [1.0, 3.0], [-3.0, 1.0], [1.0, -3.0]])[None, None]
    axes = torch.eye(2)[None]
    assert hash_buckets(vectors, axes, (4,)).tolist() == [[[[0, 1, 2, 3]]]]
    sign_of_x = torch.tensor([[[1.0], [0.0]]])
    digits = torch.cat([sign_of_x, axes], dim=-1)
    assert hash_buckets(vectors, digits, (2, 4)).tolist() == [[[[0, 1, 4 + 2, 3]]]]


def test_near_vectors_share_a_bucket_more_often_than_far_ones() -> None:
    base = torch.randn(1, 1, 200, 32)
    near, far = base + 0.1 * torch.randn_like(base), torch.randn_like(base)
    rotations = torch.randn(8, 32, 16)
    of_base, of_near, of_far = (hash_buckets(x, rotations, (32,)) for x in (base, near, far))
    assert (of_base == of_near).double().mean() > 0.7
    assert (of_base == of_far).double().mean() < 0.1


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def test_memory_grows_linearly_with_the_length() -> None:
    """With chunks of 16 and 2 * length / chunk buckets, the largest tensor is proportional to the length."""

    def largest_tensor(length: int, chunk: int) -> int:
        query = torch.randn(1, 1, length, 8, requires_grad=True)
        side = int((2 * length / 16) ** 0.5)
        with Largest() as largest:
            bucket = hash_buckets(query.detach(), torch.randn(2, 8, side), (side, side))
            lsh_attention(query, query, bucket, chunk=chunk).sum().backward()
        return largest.elements

    assert largest_tensor(2048, 16) == 4 * largest_tensor(512, 16)
    assert largest_tensor(512, 512) == 16 * largest_tensor(128, 128), "a single chunk is the full matrix"
