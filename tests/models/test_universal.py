"""The Universal Transformer: a repeated block, and positions that halt independently."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from longspan.checkpoints.model_folder import save_model
from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.nn.ponder import Ponder
from longspan.tokenizers import ByteTokenizer
from tests.cli.conftest import Cli, cli  # noqa: F401 (a fixture)
from tests.support import build

SMALL = {"vocabulary": 11, "width": 8, "heads": 2, "inner": 12, "segment": 16, "dropout": 0.0}


def make(dtype: torch.dtype = torch.float64, **values: object) -> LanguageModel:
    torch.manual_seed(3)
    model = build("universal", SMALL | values).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model.eval()


def text(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (rows, count + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def torch_layer(model: LanguageModel) -> nn.TransformerEncoderLayer:
    """torch's encoder layer with the weights of the shared block."""
    ours, c = model.layers[0], model.config
    theirs = nn.TransformerEncoderLayer(c.width, c.heads, c.inner, 0.0, batch_first=True).to(
        ours.attention.query.weight
    )
    pairs = {
        "self_attn.in_proj_weight": torch.cat([getattr(ours.attention, n).weight for n in ("query", "key", "value")]),
        "self_attn.out_proj.weight": ours.attention.output.weight,
        "linear1.weight": ours.feed_forward.up.weight,
        "linear1.bias": ours.feed_forward.up.bias,
        "linear2.weight": ours.feed_forward.down.weight,
        "linear2.bias": ours.feed_forward.down.bias,
        "norm1.weight": ours.attention_residual.norm.weight,
        "norm1.bias": ours.attention_residual.norm.bias,
        "norm2.weight": ours.feed_forward_residual.norm.weight,
        "norm2.bias": ours.feed_forward_residual.norm.bias,
    }
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(pairs.get(name, torch.zeros_like(parameter)))
    return theirs.eval()


def signal(position: int, step: int, width: int) -> torch.Tensor:
    """Sines of every frequency, then cosines, of the position and of the step, added."""
    angles = [[p / 10000 ** (2 * k / width) for k in range(width // 2)] for p in (position, step)]
    values = [sum(f(a[k]) for a in angles) for f in (math.sin, math.cos) for k in range(width // 2)]
    return torch.tensor(values, dtype=torch.float64)


def apply(theirs: nn.Module, s: torch.Tensor, step: int) -> torch.Tensor:
    """One step of all positions: signals added, torch's layer, causal."""
    T = s.shape[1]
    x = s + torch.stack([signal(i, step, s.shape[2]) for i in range(T)]).to(s.dtype)
    return theirs(x, src_mask=nn.Transformer.generate_square_subsequent_mask(T, dtype=s.dtype))


@torch.no_grad()
def test_one_step_is_one_layer() -> None:
    """Against torch's encoder layer with a causal mask, in float32."""
    model = make(torch.float32, steps=1)
    tokens, _ = text(2, 12)
    hidden, _ = model.hidden_states(tokens)
    expected = apply(torch_layer(model), model.embedding(tokens), 1)
    torch.testing.assert_close(hidden[-1], expected, rtol=0, atol=1e-5)
    assert model.facts() == {"mean_steps": 1.0}


@torch.no_grad()
def test_without_halting_the_same_layer_is_applied_at_every_step() -> None:
    model = make(steps=4)
    model.halting.weight.zero_()
    model.halting.bias.fill_(-60.0)
    tokens, _ = text(2, 12)
    hidden, _ = model.hidden_states(tokens)
    s, theirs = model.embedding(tokens), torch_layer(model)
    for step in range(1, 5):
        s = apply(theirs, s, step)
        torch.testing.assert_close(hidden[step], s, rtol=0, atol=1e-10)


def halting_reference(model: LanguageModel, tokens: torch.Tensor) -> tuple[torch.Tensor, list[list[float]]]:
    """Graves 2016, one position at a time: outputs, and [steps, remainder] of every position."""
    c, theirs = model.config, torch_layer(model)
    s = model.embedding(tokens[None])[0]
    T = len(tokens)
    total, out, counts = [0.0] * T, torch.zeros_like(s), [[0, 0.0] for _ in range(T)]
    halted = [False] * T
    for step in range(1, c.steps + 1):
        moved = apply(theirs, s[None], step)[0]
        after = s.clone()
        for i in range(T):
            if halted[i]:
                continue
            p = float(torch.sigmoid(model.halting(s[i] + signal(i, step, c.width))))
            after[i] = moved[i]
            counts[i][0] += 1
            if total[i] + p > c.threshold or step == c.steps:
                halted[i], counts[i][1] = True, 1 - total[i]
                out[i] += (1 - total[i]) * moved[i]
            else:
                total[i] += p
                out[i] += p * moved[i]
        s = after
    return out, counts


@torch.no_grad()
def test_positions_halt_independently_and_are_still_attended_to() -> None:
    model = make(steps=6, threshold=0.9)
    model.halting.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    tokens, targets = text(2, 14)
    hidden, _ = model.hidden_states(tokens)
    rows = [halting_reference(model, row) for row in tokens]
    torch.testing.assert_close(hidden[-1], torch.stack([out for out, _ in rows]), rtol=0, atol=1e-10)
    taken = [n for _, counts in rows for n, _ in counts]
    assert len(set(taken)) >= 3, "the case must have positions that halt early and late"
    assert model.facts()["mean_steps"] == pytest.approx(sum(taken) / len(taken))
    plain = model.losses(tokens, targets)[0].mean()
    loss, _ = model.train().training_loss(tokens, targets)
    cost = sum(n + rest for _, counts in rows for n, rest in counts) / len(taken)
    assert float(loss - plain) == pytest.approx(0.01 * cost)


def test_weights_of_steps_sum_to_one_and_the_cost_has_the_gradient_of_the_remainder() -> None:
    """p = 0.3, 0.4, 0.5, ... at a threshold of 0.99: halts at the third step, remainder 0.3; then with at most 2
    steps."""
    p = torch.tensor([0.3, 0.4, 0.5, 0.6], dtype=torch.float64, requires_grad=True)
    for last, steps, weights, slope in ((3, 3, [0.3, 0.4, 0.3, 0], [-1, -1, 0, 0]), (1, 2, [0.3, 0.7], [-1, 0, 0, 0])):
        ponder = Ponder(torch.zeros(1, 1, dtype=torch.float64), 0.99)
        counts = [float(ponder.step(p[t].view(1, 1), last=t == last).detach()) for t in range(last + 1)]
        assert counts == pytest.approx(weights)
        assert int(ponder.steps) == steps
        (gradient,) = torch.autograd.grad(ponder.cost(), p)
        assert gradient.tolist() == slope


def test_steps_end_when_all_positions_have_halted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that halt at the first step apply the block once, whatever the maximum number of steps."""
    model = make(steps=50)
    with torch.no_grad():
        model.halting.bias.fill_(60.0)
        model.halting.weight.zero_()
    applied: list[int] = []
    block = model._block
    monkeypatch.setattr(model, "_block", lambda *rest: applied.append(1) or block(*rest))
    hidden, _ = model.hidden_states(text(2, 12)[0])
    assert len(applied) == 1
    assert len(hidden) == 51


def test_eval_reports_the_mean_steps(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    save_model(tmp_path / "m", make(torch.float32, vocabulary=256, steps=3), ByteTokenizer(), notes=[])
    (tmp_path / "text.txt").write_bytes(b"as often as needed, and no more. " * 4)
    assert 1 <= cli("eval", "m", "--data", "text.txt", "--json").json["mean_steps"] <= 3


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"steps": 0}, r"model\.steps=0.* 1"),
        ({"threshold": 0.0}, r"model\.threshold=0\.0"),
        ({"ponder": -0.1}, r"model\.ponder=-0\.1"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("universal", SMALL | values)
