"""Position encodings against their formulas, and when position keys are cached."""

import math
from dataclasses import replace

import pytest
import torch

from longspan.cache import empty_cache
from longspan.contract import State
from longspan.errors import ConfigError
from longspan.nn.positions import (
    PositionKeys,
    ShawDistances,
    distance_sinusoid,
    log_distance_sinusoid,
    reusable_tables,
    sinusoid,
)
from longspan.reading import Reading
from tests.support import build

LIKE = torch.zeros((), dtype=torch.float64)


def test_sinusoid_equals_its_formula() -> None:
    found = sinusoid(torch.tensor([0.0, 3.0]), 4)
    slow = 10000 ** (-2 / 4)
    expected = [[0, 0, 1, 1], [math.sin(3), math.sin(3 * slow), math.cos(3), math.cos(3 * slow)]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_an_odd_width_loses_its_last_cosine() -> None:
    assert sinusoid(torch.arange(3.0), 5).shape == (3, 5)


def test_distances_descend_so_fewer_are_the_end_of_a_longer_table() -> None:
    long, short = distance_sinusoid(9, 6, LIKE), distance_sinusoid(4, 6, LIKE)
    torch.testing.assert_close(long[-4:], short)
    torch.testing.assert_close(short[-1], sinusoid(torch.tensor([0.0]), 6)[0])


def test_half_of_the_features_are_sinusoids_of_the_logarithm() -> None:
    slow = 10000 ** (-2 / 3)

    def features(d: int) -> list[float]:
        a, b = d, 8 * math.log2(1 + d)
        return [math.sin(a), math.sin(a * slow), math.cos(a), math.sin(b), math.cos(b)]

    expected = torch.tensor([features(d) for d in range(70_000, -1, -1)], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # computed in float64, then rounded
        found = log_distance_sinusoid(70_001, 5, LIKE.to(dtype))
        torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=1e-9)
    even = log_distance_sinusoid(70_001, 4, LIKE)
    torch.testing.assert_close(even, expected[:, [0, 2, 3, 4]], rtol=0, atol=1e-9)


@torch.no_grad()
def test_position_keys_are_kept_only_with_fixed_weights() -> None:
    """A trainable state has no tables; a key-value cache keeps them, and they grow by powers of two."""
    layer, calls = PositionKeys(6, 2, 4), []

    def R(count: int) -> torch.Tensor:
        calls.append(count)
        return distance_sinusoid(count, 6, layer.projection.weight)

    def keys(count: int, state: State) -> tuple[torch.Tensor, State]:
        (found,), shared = reusable_tables([layer], [count], state, R)
        return found, replace(state, shared=shared)

    shape = {"width": 6, "heads": 2, "head_width": 4}
    like, length = layer.projection.weight, torch.zeros(1, dtype=torch.int64)
    trained, fixed = (
        State((empty_cache(like, 1, 0, **shape, trainable=trainable),), length, Reading())
        for trainable in (True, False)
    )
    first, trained = keys(8, trained)
    assert trained.shared == ()
    layer.projection.weight.data.mul_(2)  # without autograd, as averaging and pruning do
    torch.testing.assert_close(keys(8, trained)[0], 2 * first)
    calls.clear()
    found, fixed = keys(8, fixed)
    torch.testing.assert_close(found, 2 * first)
    found, fixed = keys(5, fixed)
    torch.testing.assert_close(found, 2 * first[:, -5:])
    assert calls == [8]
    found, fixed = keys(9, fixed)
    assert found.shape[1] == 9
    found, fixed = keys(16, fixed)
    assert calls == [8, 16]
    torch.testing.assert_close(found[:, -8:], 2 * first)


def test_shaw_distances_beyond_the_last_share_its_vector() -> None:
    layer = ShawDistances(2, 4, max_distance=3)
    torch.nn.init.normal_(layer.table)
    assert layer(10).shape == (2, 4, 4)
    torch.testing.assert_close(layer(10)[:, 0], layer.table[:, 3])
    torch.testing.assert_close(layer(2), torch.stack([layer.table[:, 1], layer.table[:, 0]], dim=1))


@pytest.mark.parametrize(
    ("family", "key", "more"),
    [
        ("gpt", "positions=4", "positions=6"),
        ("bert", "positions=4", "positions=6"),
        ("bigbird", "max_distance=3", "max_distance=5"),
        ("sparse", "max_distance=3", "max_distance=5"),
        ("vanilla", "max_distance=3", "max_distance=5"),
    ],
)
def test_a_segment_without_a_learned_position_is_refused_with_the_key_of_the_family(
    family: str, key: str, more: str
) -> None:
    name, _, count = key.partition("=")
    values = {"vocabulary": 11, "layers": 1, "width": 8, "heads": 2, name: int(count), "segment": 4}
    values |= {"position": "learned"} if family == "vanilla" else {}
    with pytest.raises(ConfigError, match=rf"^segment=6 .* 4 learned positions.* at most 4.*model\.{more}$"):
        build(family, {**values, "segment": 6})
    with pytest.raises(ConfigError, match=rf"^a segment of 6 tokens .* 4 learned positions.*model\.{more}$"):
        build(family, values).encode(torch.zeros(1, 6, dtype=torch.int64))
