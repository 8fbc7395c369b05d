"""The QRNN against a loop over time that follows the equations of the paper."""

import pytest
import torch
from torch import nn

from longspan.cache.recurrent import QRNNCache
from longspan.contract import UNBOUNDED
from longspan.errors import ConfigError
from longspan.models.families import state_bytes
from tests.models.test_lstm import make, some_text


def qrnn(dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    return make(dtype, "qrnn", **{"zoneout": 0.0} | changes)


def looped(model: nn.Module, tokens: torch.Tensor, starts: torch.Tensor | None = None) -> list[torch.Tensor]:
    """c_t = f_t c_{t-1} + (1 - f_t) z_t and h_t = o_t c_t, one row and one token at a time."""
    hidden = [model.embedding.tables[0][tokens]]
    for layer in model.layers:
        units, rows = layer.convolution.out_features // 3, []
        for row, x in enumerate(hidden[-1]):
            c, before, steps = x.new_zeros(units), torch.zeros_like(x[0]), []
            for t in range(len(x)):
                if starts is not None and starts[row, t]:
                    c, before = torch.zeros_like(c), torch.zeros_like(before)
                source = torch.cat([before, x[t]]) if layer.window == 2 else x[t]
                gates = layer.convolution.weight @ source + layer.convolution.bias
                z, f, o = gates[:units].tanh(), gates[units : 2 * units].sigmoid(), gates[2 * units :].sigmoid()
                c = f * c + (1 - f) * z
                steps.append(o * c)
                before = x[t]
            rows.append(torch.stack(steps))
        hidden.append(torch.stack(rows))
    return hidden


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cuts", [[23], [1, 4, 5, 13]])
def test_every_layer_equals_the_loop(documents: bool, window: int, cuts: list[int]) -> None:
    model = qrnn(window=window).eval()
    tokens, starts = some_text()
    expected = looped(model, tokens, starts if documents else None)
    state, pieces = None, []
    with torch.no_grad():
        for piece, here in zip(tokens.split(cuts, 1), starts.split(cuts, 1), strict=True):
            hidden, state = model.hidden_states(piece, state, here if documents else None)
            pieces.append(hidden)
    for found, wanted in zip(zip(*pieces, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2])
def test_gradients_equal_those_of_the_loop(window: int) -> None:
    model = qrnn(torch.float64, window=window).train()
    tokens, starts = some_text()
    weight = torch.randn(3, 23, 7, dtype=torch.float64)
    parameters = [model.embedding.tables[0], *model.layers.parameters()]
    read, _ = model.hidden_states(tokens, None, starts)
    found = torch.autograd.grad((read[-1] * weight).sum(), parameters)
    expected = torch.autograd.grad((looped(model, tokens, starts)[-1] * weight).sum(), parameters)
    for gradient, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10)


def test_zoneout_keeps_cells_unchanged() -> None:
    """In training c of some units is unchanged and the others are updated as usual; in evaluation every update is
    scaled."""
    model = qrnn(torch.float64, layers=1, width=64, zoneout=0.3)
    layer, x = model.layers[0], torch.randn(2, 12, 64, dtype=torch.float64)
    carried = QRNNCache(*(torch.randn(2, 64, dtype=torch.float64) for _ in range(2)))

    def cells() -> torch.Tensor:
        """c after every token, one call per token."""
        state, steps = carried, [carried[1]]
        for t in range(12):
            _, state = layer(x[:, t : t + 1], state, None)
            steps.append(state[1])
        return torch.stack(steps, dim=1)

    source = torch.cat([torch.cat([carried[0][:, None], x[:, :-1]], 1), x], -1)
    z, f, _ = layer.convolution(source).chunk(3, -1)
    z, f = z.tanh(), f.sigmoid()
    layer.train()
    c = cells()
    held = c[:, 1:] == c[:, :-1]
    assert abs(held.double().mean() - 0.3) < 0.05
    moved = f * c[:, :-1] + (1 - f) * z
    torch.testing.assert_close(c[:, 1:][~held], moved[~held], rtol=0, atol=1e-10)
    layer.eval()
    c = cells()
    expected = 0.3 * c[:, :-1] + 0.7 * (f * c[:, :-1] + (1 - f) * z)
    torch.testing.assert_close(c[:, 1:], expected, rtol=0, atol=1e-10)


def test_a_layer_caches_its_cell_and_its_last_input() -> None:
    model = qrnn().eval()
    assert model.reach() == UNBOUNDED
    assert state_bytes(model) == 8 + 4 * ((7 + 12) + (12 + 12) + (12 + 7))
    _, state = model.hidden_states(some_text()[0])
    assert [tuple(cache.x.shape) for cache in state.caches] == [(3, 7), (3, 12), (3, 12)]
    assert [tuple(cache.c.shape) for cache in state.caches] == [(3, 12), (3, 12), (3, 7)]
    assert all(cache.x.numel() == 0 for cache in qrnn(window=1).initial_state(1).caches)
    narrow = qrnn(torch.bfloat16).initial_state(1).caches[0]
    assert narrow.x.dtype == torch.bfloat16
    assert narrow.c.dtype == torch.float32, "it sums over the complete stream"


def test_an_invalid_config_is_refused_with_the_key_and_its_value() -> None:
    with pytest.raises(ConfigError, match=r"model\.window=3.*1 or 2"):
        qrnn(window=3)
    with pytest.raises(ConfigError, match=r"model\.zoneout=1\.0.*\[0, 1\)"):
        qrnn(zoneout=1.0)
