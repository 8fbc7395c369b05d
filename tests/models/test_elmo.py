"""ELMo against its equations, written out by hand."""

import torch
from torch.nn import functional as F

from longspan.models.elmo import BEGIN, END, PADDING, ELMo, ELMoConfig


def make(**values: object) -> ELMo:
    torch.manual_seed(2)
    shape = {"vocabulary": 30, "width": 6, "layers": 2, "dropout": 0.0, "characters": 4, "filters": ((1, 3), (2, 4))}
    return ELMo(ELMoConfig(**(shape | values))).double().eval()


def test_tokens_are_spelled() -> None:
    model = make()
    model.spell([b"a", b"abcdef", b""])
    assert model.embedding.spelling[:3].tolist() == [
        [BEGIN, 97, END, PADDING, PADDING, PADDING],
        [BEGIN, 97, 98, 99, 100, END],
        [BEGIN, END, PADDING, PADDING, PADDING, PADDING],
    ]


def test_the_vector_of_a_token() -> None:
    model = make()
    model.spell([b"xy", b"z"])
    parts = model.embedding
    letters = [parts.tables[0][c] for c in (BEGIN, ord("x"), ord("y"), END, PADDING, PADDING)]
    found = []
    for convolution in parts.convolutions:
        size = convolution.kernel_size[0]
        for weight, bias in zip(convolution.weight, convolution.bias, strict=True):
            windows = [torch.stack(letters[k : k + size], dim=1) for k in range(len(letters) - size + 1)]
            found.append(max(((weight * window).sum() + bias).item() for window in windows))
    x = torch.tensor(found, dtype=torch.float64).relu()
    for highway in parts.highways:
        change, gate = (highway.weight @ x + highway.bias).split(len(x))
        x = torch.sigmoid(gate) * change.relu() + (1 - torch.sigmoid(gate)) * x
    torch.testing.assert_close(parts(torch.tensor([[0]]))[0, 0], parts.projection.weight @ x + parts.projection.bias)


def lstm(layer: torch.nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    h = c = torch.zeros(6, dtype=torch.float64)
    outputs = []
    for x in inputs:
        gates = layer.input.weight @ x + layer.input.bias + layer.hidden.weight @ h + layer.hidden.bias
        i, f, g, o = gates.split(6)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h + x if layer.residual else h)
    return outputs


def test_both_directions_and_the_loss() -> None:
    model = make()
    tokens, targets = torch.randint(30, (1, 5)), torch.randint(30, (1, 5))
    x = list(model.embedding(tokens)[0])
    right, left = x, x[::-1]
    expected = [torch.cat([torch.stack(x)] * 2, dim=-1)]
    for forward, backward in zip(model.layers, model.backward_layers, strict=True):
        right, left = lstm(forward, right), lstm(backward, left)
        expected.append(torch.cat([torch.stack(right), torch.stack(left[::-1])], dim=-1))
    hidden, _ = model.encode(tokens)
    for a, b in zip(hidden, expected, strict=True):
        torch.testing.assert_close(a[0], b)
    table, bias = model.head.tables[0], model.head.biases[0]
    ahead = F.cross_entropy(torch.stack(right) @ table.t() + bias, targets[0])
    behind = F.cross_entropy(torch.stack(left[::-1])[1:] @ table.t() + bias, tokens[0, :-1])
    torch.testing.assert_close(model.training_loss(tokens, targets)[0], (ahead + behind) / 2)


def test_documents_do_not_see_each_other() -> None:
    model = make()
    tokens = torch.randint(30, (2, 7))
    starts = torch.zeros(2, 7, dtype=torch.bool)
    starts[0, 3] = True
    hidden, _ = model.encode(tokens, None, starts)
    for part in (slice(0, 3), slice(3, 7)):
        alone, _ = model.encode(tokens[:1, part])
        torch.testing.assert_close(hidden[-1][:1, part], alone[-1])
