import math

import torch

from longspan.layers.positions import ShawDistances, SinusoidDistances, distance_sinusoid, sinusoid


def test_sinusoid_by_hand() -> None:
    found = sinusoid(torch.tensor([0.0, 3.0]), 4)
    slow = 10000 ** (-2 / 4)
    expected = [[0, 0, 1, 1], [math.sin(3), math.sin(3 * slow), math.cos(3), math.cos(3 * slow)]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_an_odd_width_loses_its_last_cosine() -> None:
    assert sinusoid(torch.arange(3.0), 5).shape == (3, 5)


def test_distances_descend_and_fewer_are_the_end_of_more() -> None:
    long, short = distance_sinusoid(9, 6, torch.device("cpu")), distance_sinusoid(4, 6, torch.device("cpu"))
    torch.testing.assert_close(long[-4:], short)
    torch.testing.assert_close(short[-1], sinusoid(torch.tensor([0.0]), 6)[0])


def test_distances_are_kept_only_where_the_weights_are_said_to_be_fixed() -> None:
    layer = SinusoidDistances(6, 2, 4).eval()
    calls = []

    def R(count: int) -> torch.Tensor:
        calls.append(count)
        return distance_sinusoid(count, 6, torch.device("cpu")).float()

    with torch.no_grad():
        first = layer(8, R)
        layer.projection.weight.data.mul_(2)  # behind autograd's back, as averaging and pruning do
        torch.testing.assert_close(layer(8, R), 2 * first)
        calls.clear()
        layer.fix(True)
        torch.testing.assert_close(layer(8, R), 2 * first)
        torch.testing.assert_close(layer(5, R), 2 * first[:, -5:])
        assert calls == [8]
        layer(12, R)
        assert calls == [8, 12]
        layer.fix(False)
        layer.projection.weight.data.mul_(2)
        torch.testing.assert_close(layer(8, R), 4 * first)


def test_shaw_takes_the_last_distance_for_all_beyond() -> None:
    layer = ShawDistances(2, 4, max_distance=3)
    torch.nn.init.normal_(layer.table)
    assert layer(10).shape == (2, 4, 4)
    torch.testing.assert_close(layer(10)[:, 0], layer.table[:, 3])
    torch.testing.assert_close(layer(2), torch.stack([layer.table[:, 1], layer.table[:, 0]], dim=1))
