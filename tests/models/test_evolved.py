"""The Evolved Transformer against its block as drawn in the paper, in plain torch functions."""

import pytest
import torch
from torch.nn import functional as F

from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.nn.convolution import CausalSeparableConvolution
from longspan.nn.positions import sinusoid
from tests.support import build

SMALL = {"vocabulary": 11, "layers": 2, "width": 8, "heads": 2, "inner": 12, "segment": 16, "dropout": 0.0}


def make(dtype: torch.dtype = torch.float64, **values: object) -> LanguageModel:
    torch.manual_seed(3)
    model = build("evolved", SMALL | values).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model.eval()


def text(rows: int, count: int) -> torch.Tensor:
    return torch.randint(11, (rows, count), generator=torch.Generator().manual_seed(5))


def norm(x: torch.Tensor, w: dict, name: str) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def attention(x: torch.Tensor, w: dict, name: str, heads: int) -> torch.Tensor:
    """One row, head by head, with a causal mask."""
    T, E = x.shape
    future = torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1)
    q, k, v = (x @ w[f"{name}.{part}.weight"].t() for part in ("query", "key", "value"))
    D = E // heads
    reads = [
        torch.softmax(q[:, i : i + D] @ k[:, i : i + D].t() / D**0.5 + future, dim=-1) @ v[:, i : i + D]
        for i in range(0, E, D)
    ]
    return torch.cat(reads, dim=1) @ w[f"{name}.output.weight"].t()


def separable(x: torch.Tensor, w: dict, name: str, kernel: int) -> torch.Tensor:
    """Position by position, tap by tap."""
    taps, out = w[f"{name}.depthwise"], []
    assert len(taps) == kernel
    for t in range(len(x)):
        total = sum(taps[k] * x[t - k] for k in range(kernel) if t - k >= 0)
        out.append(w[f"{name}.pointwise.weight"] @ total + w[f"{name}.pointwise.bias"])
    return torch.stack(out)


def block(h: torch.Tensor, w: dict, heads: int) -> torch.Tensor:
    """Figure 3, right, without attention to an encoder."""
    h = h + attention(norm(h, w, "residuals.0.norm"), w, "wide_attention", 2 * heads)
    x = norm(h, w, "residuals.1.norm")
    left = torch.relu(separable(x, w, "left", 11))
    right = separable(x, w, "right", 7)
    joined = left.clone()
    joined[:, : right.shape[1]] += right
    h = h + separable(norm(joined, w, "branch_norm"), w, "joined", 7)
    h = h + attention(norm(h, w, "residuals.2.norm"), w, "attention", heads)
    up = norm(h, w, "residuals.3.norm") @ w["up.weight"].t() + w["up.bias"]
    inner = norm(up * torch.sigmoid(up), w, "inner_norm")
    return h + inner @ w["down.weight"].t() + w["down.bias"]


@torch.no_grad()
def test_the_block_equals_the_figure_of_the_paper() -> None:
    """Two blocks over fourteen positions, more than the longest kernel, in float64; all hidden states."""
    model = make()
    tokens = text(1, 14)
    hidden, _ = model.hidden_states(tokens)
    h = model.embedding.tables[0][tokens[0]] * 8**0.5 + sinusoid(torch.arange(14).double(), 8)
    for n, layer in enumerate(model.layers):
        torch.testing.assert_close(hidden[n][0], h, rtol=0, atol=1e-10)
        h = block(h, dict(layer.named_parameters()), 2)
    h = F.layer_norm(h, (8,), model.final_norm.weight, model.final_norm.bias)
    torch.testing.assert_close(hidden[-1][0], h, rtol=0, atol=1e-10)


def test_a_convolution_is_causal_and_stays_within_its_document() -> None:
    """Against a sum over taps, one position at a time, with and without documents, gradients too."""
    torch.manual_seed(0)
    conv = CausalSeparableConvolution(4, 6, 7).double()
    x = torch.randn(2, 12, 4, dtype=torch.float64, requires_grad=True)
    first = torch.zeros(2, 12, dtype=torch.int64)
    first[0, 5:] = 5
    first[1, 2:] = 2
    first[1, 11:] = 11
    for first_key in (None, first):
        found = conv(x, first_key)
        rows = []
        for b in range(2):
            for t in range(12):
                begin = 0 if first_key is None else int(first_key[b, t])
                total = sum(conv.depthwise[k] * x[b, t - k] for k in range(7) if t - k >= begin)
                rows.append(conv.pointwise.weight @ total + conv.pointwise.bias)
        expected = torch.stack(rows).view(2, 12, 6)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        weight = torch.randn_like(found)
        leaves = [x, *conv.parameters()]
        for a, b in zip(
            torch.autograd.grad((found * weight).sum(), leaves),
            torch.autograd.grad((expected * weight).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_document_does_not_depend_on_the_previous_one_within_the_longest_kernel() -> None:
    """Changing every token before a document does not change its logits, which equal those of the document alone."""
    model = make()
    tokens = text(1, 16)
    starts = torch.zeros(1, 16, dtype=torch.bool)
    starts[0, 7] = True
    changed = tokens.clone()
    changed[0, :7] = (changed[0, :7] + 3) % 11
    with torch.no_grad():
        a, _ = model(tokens, starts=starts)
        b, _ = model(changed, starts=starts)
        alone, _ = model(tokens[:, 7:])
    torch.testing.assert_close(a[:, 7:], b[:, 7:], rtol=0, atol=1e-12)
    torch.testing.assert_close(a[:, 7:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "named"),
    [({"width": 9, "heads": 3, "head_width": 2}, r"model\.width=9"), ({"width": 6}, r"width 3.*model\.heads=2")],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("evolved", SMALL | values)
