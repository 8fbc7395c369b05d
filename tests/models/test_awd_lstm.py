"""The five dropouts and two penalties of AWD-LSTM, each against its definition."""

import pytest
import torch

from longspan.errors import ConfigError
from longspan.nn import lstm as layer_module
from longspan.nn.dropout import WordDropout
from tests.models.test_lstm import make, some_text, stepped

OFF = dict.fromkeys(("dropout", "input_dropout", "hidden_dropout", "embedding_dropout", "weight_dropout"), 0.0)


def awd(dtype: torch.dtype = torch.float32, **changes: object) -> torch.nn.Module:
    return make(dtype, "awd-lstm", **OFF | {"ar": 0.0, "tar": 0.0} | changes).train()


@pytest.mark.parametrize(
    ("key", "place", "calls"),
    [("input_dropout", "input_dropout", 1), ("hidden_dropout", "hidden_dropout", 2), ("dropout", "output_dropout", 1)],
)
def test_locked_masks_are_the_same_over_time_and_differ_between_rows(key: str, place: str, calls: int) -> None:
    model, seen = awd(width=40, inner=50, **{key: 0.4}), []
    getattr(model, place).register_forward_hook(lambda _, inputs, output: seen.append(output / inputs[0]))
    plain = stepped(model, some_text()[0])
    dropped, _ = model.hidden_states(some_text()[0])
    assert len(seen) == calls
    for mask in seen:
        assert torch.allclose(mask, mask[:, :1].expand_as(mask), atol=1e-4), "one mask for all positions"
        first = mask[:, 0]
        assert torch.allclose(first[first != 0], torch.tensor(1 / 0.6), atol=1e-4)
        assert 0.2 < (first == 0).float().mean() < 0.6
        assert not torch.equal(first[0] == 0, first[1] == 0)
    untouched = {"input_dropout": 0, "hidden_dropout": 1, "dropout": 3}[key]
    for n in range(untouched):
        torch.testing.assert_close(dropped[n], plain[n], rtol=0, atol=1e-5)


def test_a_dropped_word_is_dropped_at_all_its_positions() -> None:
    drop = WordDropout(1000, 0.3)
    tokens = torch.arange(1000).repeat(2)[None].repeat(3, 1)
    factors = drop(torch.ones(3, 2000, 4), tokens)
    assert (factors == factors[0, :, :1]).all(), "the same in all rows and units"
    assert torch.equal(factors[0, :1000], factors[0, 1000:])
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert abs((factors[0, :1000, 0] == 0).float().mean() - 0.3) < 0.05
    assert torch.equal(drop.eval()(torch.ones(3, 2000, 4), tokens), torch.ones(3, 2000, 4))


def test_the_softmax_keeps_dropped_words() -> None:
    """Only the input is dropped: with the layers' input weights at zero, the logits do not change."""
    model = awd(embedding_dropout=0.5)
    assert not torch.equal(model(some_text()[0])[0], model(some_text()[0])[0])
    with torch.no_grad():
        model.layers[0].input.weight.zero_()
    assert torch.equal(model(some_text()[0])[0], model(some_text()[0])[0])


def test_drop_connect_drops_weights_and_not_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model, used, kernel = awd(torch.float64, weight_dropout=0.5), [], layer_module.lstm

    def recording(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, weights: list[torch.Tensor]) -> tuple:
        used.append([weight.detach().clone() for weight in weights])
        return kernel(x, h, c, weights)

    monkeypatch.setattr(layer_module, "lstm", recording)
    tokens, starts = some_text()
    hidden, _ = model.hidden_states(tokens, None, starts)
    hidden[-1].sum().backward()
    for n, layer in enumerate(model.layers):
        calls = used[4 * n : 4 * n + 4]
        assert all(torch.equal(a, b) for call in calls for a, b in zip(call, calls[0], strict=True))
        W, U, b, b_ = calls[0]
        assert torch.equal(W, layer.input.weight)
        assert torch.equal(b, layer.input.bias)
        assert torch.equal(b_, layer.hidden.bias)
        dropped = U == 0
        torch.testing.assert_close(U[~dropped], 2 * layer.hidden.weight[~dropped])
        assert 0.3 < dropped.float().mean() < 0.7
        assert torch.equal(layer.hidden.weight.grad == 0, dropped), "dropped weights get no gradient"
    model.hidden_states(tokens)
    assert not torch.equal(used[-1][1] == 0, used[-4][1] == 0), "every call draws a new mask"
    # The outputs are those of an LSTM with these weights: nothing but weights was dropped.
    with torch.no_grad():
        for n, layer in enumerate(model.layers):
            layer.hidden.weight.copy_(used[4 * n][1])
        for found, wanted in zip(hidden, stepped(model, tokens, starts), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    used.clear()
    model.eval().hidden_states(tokens)
    assert all(torch.equal(weights[1], layer.hidden.weight) for weights, layer in zip(used, model.layers, strict=True))


def penalties_by_element(h: torch.Tensor, dropped: torch.Tensor, starts: torch.Tensor) -> tuple[float, float]:
    """AR and TAR summed element by element."""
    squares = [float(x) ** 2 for x in dropped.flatten()]
    jumps = []
    for row in range(h.shape[0]):
        for t in range(1, h.shape[1]):
            if not starts[row, t]:
                jumps += [(float(a) - float(b)) ** 2 for a, b in zip(h[row, t], h[row, t - 1], strict=True)]
    return sum(squares) / len(squares), sum(jumps) / len(jumps)


@pytest.mark.parametrize("documents", [False, True])
def test_the_penalties_equal_their_definition(documents: bool) -> None:
    model, seen = awd(torch.float64, dropout=0.5, ar=2.0, tar=0.7), []
    model.output_dropout.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    tokens, starts = some_text(2, 6)
    starts[1, 4] = documents
    targets = tokens.roll(-1, 1)
    loss, _ = model.training_loss(tokens, targets, None, 0.0, starts if documents else None)
    h, dropped = (tensor.detach() for tensor in seen[0])
    ar, tar = penalties_by_element(h, dropped, starts if documents else torch.zeros_like(starts))
    plain = model.head.losses(dropped, targets).mean()
    assert (dropped == 0).any()
    assert (loss - plain).item() == pytest.approx(2.0 * ar + 0.7 * tar, abs=1e-12)
    _, state = model.training_loss(tokens[:, :1], targets[:, :1])
    assert state.batch == 2
    assert all(bool(p.grad.isfinite().all()) for p in [*backward(model, tokens[:, :1], targets[:, :1])])
    model.eval()
    scored, _ = model.training_loss(tokens, targets)
    torch.testing.assert_close(scored, model.losses(tokens, targets)[0].mean())


def backward(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.nn.Parameter]:
    """A segment of one token has no neighbours: its TAR is zero, not NaN."""
    model.zero_grad()
    model.training_loss(tokens, targets)[0].backward()
    return [p for p in model.parameters() if p.grad is not None]


def test_an_invalid_config_is_refused_with_the_key_and_its_value() -> None:
    with pytest.raises(ConfigError, match=r"model\.weight_dropout=1\.0.*\[0, 1\)"):
        awd(weight_dropout=1.0)
    with pytest.raises(ConfigError, match=r"model\.tar=-1\.0.* 0"):
        awd(tar=-1.0)
