"""Keys and values written beside those of the memory, against a concatenation."""

import pytest
import torch
from torch import nn

from longspan.cache.attention import is_plain_product, join, join_product, newest_pairs, product_beside


@pytest.mark.parametrize(("batch", "memory"), [(1, 5), (3, 5), (2, 0)])
def test_a_product_beside_the_memory_equals_a_concatenation(batch: int, memory: int) -> None:
    old, x = torch.randn(batch, 2, memory, 4), torch.randn(batch, 7, 6)
    layer = nn.Linear(6, 8, bias=False)
    with torch.no_grad():
        expected = join(old, layer(x).unflatten(-1, (2, 4)).transpose(1, 2))
        torch.testing.assert_close(product_beside(old, x, layer.weight), expected)
        torch.testing.assert_close(join_product(old, x, layer), expected)


def test_only_a_plain_product_without_gradient_is_written_beside_the_memory() -> None:
    x = torch.randn(1, 3, 6)
    layer, frozen = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False).requires_grad_(False)
    assert is_plain_product(frozen, x)
    assert not is_plain_product(frozen, x.clone().requires_grad_())
    assert not is_plain_product(layer, x)
    with torch.no_grad():
        assert is_plain_product(layer, x)
        assert not is_plain_product(nn.Linear(6, 8), x)
        assert not is_plain_product(layer.bfloat16(), x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_plain_product(frozen, x)


def test_a_long_segment_leaves_only_the_memory_behind() -> None:
    keys, values = torch.randn(2, 1, 3, 12, 4)
    short, long = newest_pairs(keys, values, 4, 5), newest_pairs(keys, values, 8, 5)
    for cache in (short, long):
        assert torch.equal(cache.keys, keys[:, :, -5:])
        assert torch.equal(cache.values, values[:, :, -5:])
    assert short.keys.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    assert long.keys.untyped_storage().nbytes() == 4 * long.keys.numel()
