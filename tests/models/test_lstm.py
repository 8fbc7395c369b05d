"""The LSTM against torch.nn.LSTM, run one token at a time."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from longspan.contract import UNBOUNDED
from longspan.errors import ConfigError, StateError
from longspan.models.families import state_bytes
from longspan.nn import lstm as layer_module
from tests.support import build

SHAPE = {"vocabulary": 11, "layers": 3, "width": 7, "inner": 12, "segment": 8, "dropout": 0.0}


def make(dtype: torch.dtype = torch.float32, family: str = "lstm", **changes: object) -> nn.Module:
    torch.manual_seed(3)
    model = build(family, {**SHAPE, **changes}).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model


def torch_layers(model: nn.Module) -> list[nn.LSTM]:
    """torch.nn.LSTM layers that share the weights of the model."""
    copies = []
    for layer in model.layers:
        own = nn.LSTM(layer.input.in_features, layer.hidden.in_features, batch_first=True)
        own = own.to(layer.input.weight.dtype)
        own.weight_ih_l0, own.bias_ih_l0 = layer.input.weight, layer.input.bias
        own.weight_hh_l0, own.bias_hh_l0 = layer.hidden.weight, layer.hidden.bias
        copies.append(own)
    return copies


def stepped(model: nn.Module, tokens: torch.Tensor, starts: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The embedding and every layer's output, token by token; a document start sets h and c of its row to zero."""
    x = model.embedding.tables[0][tokens]
    hidden = [x]
    for own in torch_layers(model):
        state = tuple(x.new_zeros(1, len(tokens), own.hidden_size) for _ in range(2))
        steps = []
        for t in range(tokens.shape[1]):
            if starts is not None:
                state = tuple(torch.where(starts[None, :, t, None], 0.0, part) for part in state)
            y, state = own(hidden[-1][:, t : t + 1], state)
            steps.append(y)
        hidden.append(torch.cat(steps, dim=1))
    return hidden


def some_text(rows: int = 3, count: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (rows, count), generator=torch.Generator().manual_seed(1))
    starts = torch.zeros(rows, count, dtype=torch.bool)
    for row, place in ((0, 0), (1, 4), (0, 9), (2, 9), (1, 22)):
        if row < rows and place < count:
            starts[row, place] = True
    return tokens, starts


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cuts", [[23], [1, 4, 5, 13], [9, 14]])
def test_every_layer_equals_torch_one_token_at_a_time(documents: bool, cuts: list[int]) -> None:
    model = make().eval()
    tokens, starts = some_text()
    expected = stepped(model, tokens, starts if documents else None)
    state, pieces = None, []
    with torch.no_grad():
        for piece, here in zip(tokens.split(cuts, 1), starts.split(cuts, 1), strict=True):
            hidden, state = model.hidden_states(piece, state, here if documents else None)
            pieces.append(hidden)
    for found, wanted in zip(zip(*pieces, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-5)
    logits, _ = model(tokens, None, starts if documents else None)
    table, bias = model.embedding.tables[0], model.head.biases[0]
    torch.testing.assert_close(logits, expected[-1] @ table.T + bias, rtol=0, atol=1e-5)


def test_a_segment_too_long_for_one_kernel_call_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 11, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    h, c = torch.randn(2, 2, 4, generator=draw, dtype=torch.float64).unbind()
    weights = [torch.randn(16, n, generator=draw, dtype=torch.float64) for n in (3, 4)]
    weights += [torch.randn(16, generator=draw, dtype=torch.float64) for _ in range(2)]
    complete = layer_module.lstm(x, h, c, weights)
    monkeypatch.setattr(layer_module, "LONGEST", 4)
    pieces = layer_module.lstm(x, h, c, weights)
    torch.testing.assert_close(pieces, complete)
    wanted, found = (torch.autograd.grad(out.sin().sum(), x)[0] for out, _, _ in (complete, pieces))
    torch.testing.assert_close(found, wanted)


def test_gradients_equal_those_of_single_steps() -> None:
    model = make(torch.float64).train()
    tokens, starts = some_text()
    weight = torch.randn(3, 23, 7, dtype=torch.float64)
    parameters = [model.embedding.tables[0], *model.layers.parameters()]
    read, _ = model.hidden_states(tokens, None, starts)
    found = torch.autograd.grad((read[-1] * weight).sum(), parameters)
    expected = torch.autograd.grad((stepped(model, tokens, starts)[-1] * weight).sum(), parameters)
    for gradient, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10)


def test_inserted_steps_equal_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients, from a state that is not empty; one row without a document start, and starts at
    both ends."""
    model, calls, kernel = make(torch.float64).train(), [], layer_module.lstm
    tokens, starts = some_text()
    starts[2] = False
    _, before = model.hidden_states(tokens)
    results = []
    for inserts in (False, True):
        monkeypatch.setattr(layer_module.LSTMLayer, "inserts", inserts)
        hidden, after = model.hidden_states(tokens, before, starts)
        gradients = torch.autograd.grad(hidden[-1].sin().sum(), list(model.layers.parameters()))
        results.append([*hidden, *gradients, *after.tensors().values()])
    for found, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    monkeypatch.setattr(layer_module, "lstm", lambda x, *rest: calls.append(x.shape[1]) or kernel(x, *rest))
    model.hidden_states(tokens, None, starts)
    assert calls == [23 + 2] * 3


@pytest.mark.gpu
def test_inserted_steps_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's gates saturate exactly: nothing of one document reaches the next, in bfloat16 too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = make().train().cuda()
    tokens, starts = (part.cuda() for part in some_text())
    results = []
    for inserts in (False, True):
        monkeypatch.setattr(layer_module.LSTMLayer, "inserts", inserts)
        hidden, after = model.hidden_states(tokens, None, starts)
        gradients = torch.autograd.grad(hidden[-1].sin().sum(), list(model.layers.parameters()))
        results.append([*hidden, *gradients, *after.tensors().values()])
    for found, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        one = model.hidden_states(tokens, None, starts)[0][-1]
        tokens[1, :4] = 0  # the first document of this row
        other = model.hidden_states(tokens, None, starts)[0][-1]
    assert torch.equal(one[1, 4:], other[1, 4:])


def test_a_segment_is_one_kernel_call_per_layer_plus_one_per_document_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, calls, kernel = make().eval(), [], layer_module.lstm
    monkeypatch.setattr(layer_module, "lstm", lambda x, *rest: calls.append(x.shape[1]) or kernel(x, *rest))
    tokens, starts = some_text()
    model.hidden_states(tokens)
    assert calls == [23] * 3
    calls.clear()
    model.hidden_states(tokens, None, starts)
    assert calls == [4, 5, 13, 1] * 3


def test_context_is_unbounded_and_the_state_is_small() -> None:
    model = make(torch.float64).eval()
    assert model.reach() == UNBOUNDED
    assert state_bytes(model) == 8 + 8 * 2 * (12 + 12 + 7)
    tokens, _ = some_text(1, 80)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 11
    with torch.no_grad():
        change = (model(tokens)[0][0, -1] - model(changed)[0][0, -1]).abs().max()
    assert change > 1e-12


def test_dropout_acts_between_layers_and_never_along_time() -> None:
    """With W = 0 a layer depends only on its biases and its state, which dropout must not change."""
    model = make(dropout=0.5, layers=1).train()
    with torch.no_grad():
        model.layers[0].input.weight.zero_()
    tokens, _ = some_text()
    outputs = [model.run_layers(tokens, None, None)[1] for _ in range(2)]
    assert torch.equal(*outputs)
    assert not torch.equal(*[model.hidden_states(tokens)[0][-1] for _ in range(2)])


def test_a_state_of_another_family_or_depth_is_refused() -> None:
    tokens, _ = some_text(1)
    other = build("transformer-xl", {"vocabulary": 11, "layers": 3, "width": 8, "heads": 2}).initial_state(1)
    with pytest.raises(StateError, match=r"3 caches.*Memory.*3 layers.*LSTMCache"):
        make().hidden_states(tokens, other)
    with pytest.raises(StateError, match=r"3 caches.*LSTMCache.*2 layers"):
        make(layers=2).hidden_states(tokens, make().initial_state(1))
    with pytest.raises(StateError, match=r"3 caches.*QRNNCache.*3 layers.*LSTMCache"):
        make().hidden_states(tokens, make(family="qrnn").initial_state(1))
    half = replace(make().initial_state(1), caches=make().initial_state(1).caches[:2])
    with pytest.raises(StateError, match=r"2 caches.*3 layers"):
        make().hidden_states(tokens, half)


def test_an_invalid_config_is_refused_with_the_key_and_its_value() -> None:
    with pytest.raises(ConfigError, match=r"model\.inner=0.* 1"):
        make(inner=0)
    with pytest.raises(ConfigError, match=r"'model\.heads'"):
        make(heads=2)
