"""The pointer against probabilities summed one candidate at a time, in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longspan.cache.pointer import PointerCache
from longspan.checkpoints.states import restore_state
from longspan.contract import LanguageModel
from longspan.decoding.open import open_decoder
from longspan.errors import ConfigError, StateError
from tests.models.paper import PAPER
from tests.support import build

SMALL = {"vocabulary": 9, "layers": 2, "width": 12, "heads": 2, "segment": 6, "memory": 6, "dropout": 0.0}


def make(family: str = "longspan-xl", **changes: Any) -> LanguageModel:
    torch.manual_seed(5)
    parts = PAPER if family == "longspan-xl" else {}
    model = build(family, SMALL | parts | {"pointer": 7, "pointer_width": 5} | changes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
        if model.pointer is not None:
            model.pointer.bias.fill_(-10.0)
    return model


def text(rows: int = 2, count: int = 20) -> torch.Tensor:
    return torch.randint(9, (rows, count), generator=torch.Generator().manual_seed(3))


def expected_probabilities(
    model: Any, tokens: torch.Tensor, hidden: torch.Tensor, scores: torch.Tensor, first_tokens: set[int]
) -> torch.Tensor:
    """p' of every token after every position of one row: the formula, one candidate at a time."""
    c, rows = model.pointer, []
    for t in range(len(tokens)):
        begin = max((b for b in first_tokens if b <= t), default=0)
        q = c.query(hidden[t]) / 5**0.5
        none = (q @ c.none + c.bias[0] + 10.0).exp()
        p = none * scores[t].softmax(-1)
        total = none
        for i in range(max(begin, t - model.reading.pointer), t):
            e = (q @ c.key(hidden[i]) + c.age_bias[(t - i).bit_length() - 1]).exp()
            p = p + e * torch.nn.functional.one_hot(tokens[i + 1], 9)
            total = total + e
        rows.append(p / total)
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["longspan-xl", "rotary"])
@pytest.mark.parametrize("cuts", [(20,), (6, 6, 6, 2), (1, 13, 6)])
@pytest.mark.parametrize("first_tokens", [set(), {0, 8, 9}])
@torch.no_grad()
def test_probabilities_equal_the_formula(family: str, cuts: tuple[int, ...], first_tokens: set[int]) -> None:
    model, tokens, state = make(family, memory=20), text(), None
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[0, sorted(first_tokens)] = True
    hidden, _ = model.hidden_states(tokens, None, starts)
    expected = [
        expected_probabilities(
            model, tokens[b], hidden[-1][b], model.head.logits(hidden[-1])[b], first_tokens if b == 0 else set()
        )
        for b in range(2)
    ]
    found, losses, targets = [], [], tokens.roll(-1, 1)
    for x, y, s in zip(tokens.split(cuts, 1), targets.split(cuts, 1), starts.split(cuts, 1), strict=True):
        given = s if first_tokens else None
        found.append(model(x, state, given)[0])
        after, _ = model.losses(x, y[:, -1:], state, given, last=1)
        loss, state = model.losses(x, y, state, given)
        torch.testing.assert_close(after, loss[:, -1:], rtol=0, atol=1e-12)
        losses.append(loss)
    probabilities = torch.cat(found, 1).exp()
    torch.testing.assert_close(probabilities, torch.stack(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(losses, 1), -probabilities.log().gather(-1, targets[..., None])[..., 0])
    assert (probabilities - model.head.logits(hidden[-1]).softmax(-1)).abs().max() > 0.1, (
        "the pointer must have an effect"
    )


@torch.no_grad()
def test_a_new_model_hardly_uses_the_pointer() -> None:
    torch.manual_seed(5)
    model = build("longspan-xl", SMALL | PAPER | {"pointer": 512, "pointer_width": 128}).eval()
    _, state = model.losses(text(2, 512), text(2, 512))
    tokens = text(2, 30)
    hidden, _ = model.hidden_states(tokens, state)
    plain, mixed = model.head.logits(hidden[-1]).softmax(-1), model(tokens, state)[0].exp()
    assert 0.001 < (plain - mixed).abs().max() < 0.02


def test_gradients_through_logits_equal_those_of_the_losses() -> None:
    tokens, found = text(), []
    for method in ("losses", "logits"):
        model = make()
        if method == "losses":
            loss = model.losses(tokens[:, :12], tokens[:, 1:13])[0].mean()
        else:
            loss = F.cross_entropy(model(tokens[:, :12])[0].flatten(0, 1), tokens[:, 1:13].flatten())
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("bias", [-1e4, -100.0, 100.0, 1e4])
@torch.no_grad()
def test_losses_and_logits_agree_at_extreme_biases(bias: float) -> None:
    model, tokens = make(), text()
    model.pointer.bias.fill_(bias)
    losses, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
    from_logits = -model(tokens[:, :-1])[0].gather(-1, tokens[:, 1:, None])[..., 0]
    assert losses.isfinite().all()
    probable = losses < 600  # float64 has no probability below exp(-708)
    assert probable.any()
    torch.testing.assert_close(from_logits[probable], losses[probable])


def test_the_pointer_compares_outputs_before_dropout() -> None:
    model, tokens, seen = make(output_dropout=0.5).train(), text(), []
    model.pointer.query.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
    model.training_loss(tokens[:, :-1], tokens[:, 1:])
    model(tokens[:, :-1])
    plain, _ = make().hidden_states(tokens[:, :-1])
    assert len(seen) == 2
    for output in seen:
        torch.testing.assert_close(output, plain[-1].detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "values",
    [
        {"pointer": 1, "layers": 1},
        {"pointer": 7, "layers": 1},
        {"pointer": 3, "memory": 4},
        {"pointer": 2, "convolution": 2},
        {"pointer": 6},
        {"pointer": 5, "memory": 4, "same_length": True},
    ],
)
@torch.no_grad()
def test_reach_is_the_distance_of_the_farthest_influence(values: dict[str, Any]) -> None:
    """Over all positions of a segment, the farthest influence is exactly at distance `reach`."""
    model = make(**values)
    count = (model.reach() // 6 + 4) * 6
    tokens = text(1, count + 1)
    changed = tokens[:, :-1].repeat(12, 1)
    changed.diagonal().add_(1).remainder_(9)

    def stream_logits(tokens: torch.Tensor) -> torch.Tensor:
        pieces, state = [], None
        for piece in tokens.split(6, dim=1):
            logits, state = model(piece, state)
            pieces.append(logits)
        return torch.cat(pieces, dim=1)

    moved = (stream_logits(changed) - stream_logits(tokens[:, :-1])).abs().amax(-1) > 1e-13
    assert max(int(row.nonzero().max()) - place for place, row in enumerate(moved)) == model.reach()


def test_gradients_reach_queries_and_keys_of_the_segment_and_stop_at_the_cache() -> None:
    model = make().train()
    tokens = text()
    _, state = model.training_loss(tokens[:, :8], tokens[:, 1:9])
    assert not any(t.requires_grad for t in state.tensors().values())
    loss, _ = model.training_loss(tokens[:, 8:14], tokens[:, 9:15], state)
    loss.backward()
    for parameter in model.pointer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


def test_it_learns_to_copy_random_strings() -> None:
    """Random strings of eight, each repeated once: only copying predicts the repetition better than 1 in 24."""
    torch.manual_seed(0)
    shape = {"vocabulary": 24, "layers": 1, "width": 32, "heads": 2, "segment": 16, "memory": 1, "dropout": 0.0}
    model = build("longspan-xl", shape | PAPER | {"convolution": 1, "pointer": 16, "pointer_width": 16})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(250):
        ids = torch.randint(24, (32, 8)).repeat(1, 2)
        losses, _ = model.losses(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    again, first = losses[:, 9:].mean().item(), losses[:, :7].mean().item()
    assert first == pytest.approx(3.18, abs=0.3), "random tokens cannot be predicted"
    assert again < 1.0, f"{again:.2f} nats where every token can be copied"


def test_states_that_do_not_fit_are_refused() -> None:
    state, without = make().initial_state(2), make(pointer=0).initial_state(2)
    with pytest.raises(StateError, match=r"width 12.*pointer=7"):
        make().losses(text(), text(), replace(without, reading=state.reading))
    cache = state.caches[-1]
    narrow = replace(state, caches=(*state.caches[:-1], cache._replace(hidden=cache.hidden[..., :6])))
    with pytest.raises(StateError, match=r"width 12.*pointer=7"):
        make().losses(text(), text(), narrow)
    hidden, tokens = f"{len(state.caches) - 1}.hidden", f"{len(state.caches) - 1}.tokens"
    for name, cut in (
        (hidden, lambda t: t[..., :6]),
        (hidden, lambda t: t[:1]),
        (tokens, lambda t: t[:, 1:]),
        (tokens, lambda t: t + 10),
    ):
        tensors = state.tensors()
        with pytest.raises(StateError, match=name):
            restore_state(make(), tensors | {name: cut(tensors[name])}, state.reading)
    partial = {name: tensor for name, tensor in state.tensors().items() if name != tokens}
    with pytest.raises(StateError, match=hidden):
        restore_state(make(), partial, state.reading)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"memory": 0}, r"pointer=7.*memory"),
        ({"pointer": -1}, r"pointer=-1"),
        ({"pointer_width": 0}, r"pointer=7.*model\.pointer_width"),
        ({"pointer_width": -1}, r"model\.pointer_width=-1"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_key_and_its_value(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(**values)


@torch.no_grad()
def test_a_stream_continues_with_another_reach() -> None:
    """A cache of 7 positions in a model with a shorter reach, a longer one, or none."""
    tokens = text()
    _, state = make().losses(tokens[:, :10], tokens[:, 1:11])
    *layers, cache = state.caches
    for reach in (0, 3, 12):
        model = make(pointer=reach)
        given = replace(state, reading=model.reading)
        found, _ = model.losses(tokens[:, 10:19], tokens[:, 11:], given)
        fitted = PointerCache(*(F.pad(part, (0, 0, max(reach - 7, 0), 0))[:, -reach:] for part in cache))
        fitting = replace(given, caches=(*layers, fitted) if reach else tuple(layers))
        expected, after = model.losses(tokens[:, 10:19], tokens[:, 11:], fitting)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert [part.shape[1] for c in after.caches if isinstance(c, PointerCache) for part in c] == (
            [reach] * 2 if reach else []
        )
        assert open_decoder(model, given).step(tokens[:, 10]).isfinite().all()
