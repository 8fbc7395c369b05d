"""What is copied, against probabilities added up one by one in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, StateError
from longspan.models.families import build

SMALL = {"vocabulary": 9, "layers": 2, "width": 12, "heads": 2, "segment": 6, "memory": 6, "dropout": 0.0}


def make(family: str = "transformer-xl", **changes: Any) -> LanguageModel:
    torch.manual_seed(5)
    model = build(family, SMALL | {"copy": 7, "copy_width": 5} | changes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
        if model.copying is not None:
            model.copying.bias.fill_(-10.0)
    return model


def text(rows: int = 2, count: int = 20) -> torch.Tensor:
    return torch.randint(9, (rows, count), generator=torch.Generator().manual_seed(3))


def added_up(
    model: Any, tokens: torch.Tensor, hidden: torch.Tensor, scores: torch.Tensor, begins: set[int]
) -> torch.Tensor:
    """p' of every token after every position of one row, by the formula, one candidate after another."""
    c, rows = model.copying, []
    for t in range(len(tokens)):
        begin = max((b for b in begins if b <= t), default=0)
        q = c.query(hidden[t]) / 5**0.5
        none = (q @ c.none + c.bias[0] + 10.0).exp()
        p = none * scores[t].softmax(-1)
        total = none
        for i in range(max(begin, t - model.config.copy), t):
            e = (q @ c.key(hidden[i]) + c.age_bias[(t - i).bit_length() - 1]).exp()
            p = p + e * torch.nn.functional.one_hot(tokens[i + 1], 9)
            total = total + e
        rows.append(p / total)
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["transformer-xl", "rotary"])
@pytest.mark.parametrize("cuts", [(20,), (6, 6, 6, 2), (1, 13, 6)])
@pytest.mark.parametrize("begins", [set(), {0, 8, 9}])
@torch.no_grad()
def test_every_probability_is_the_sum_it_says_it_is(family: str, cuts: tuple[int, ...], begins: set[int]) -> None:
    model, tokens, state = make(family, memory=20), text(), None
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[0, sorted(begins)] = True
    hidden, _ = model.hidden_states(tokens, None, starts)
    expected = [
        added_up(model, tokens[b], hidden[-1][b], model.head.logits(hidden[-1])[b], begins if b == 0 else set())
        for b in range(2)
    ]
    found, losses, targets = [], [], tokens.roll(-1, 1)
    for x, y, s in zip(tokens.split(cuts, 1), targets.split(cuts, 1), starts.split(cuts, 1), strict=True):
        given = s if begins else None
        found.append(model(x, state, given)[0])
        after, _ = model.next_losses(x, y[:, -1], state, given)
        loss, state = model.losses(x, y, state, given)
        torch.testing.assert_close(after, loss[:, -1], rtol=0, atol=1e-12)
        losses.append(loss)
    probabilities = torch.cat(found, 1).exp()
    torch.testing.assert_close(probabilities, torch.stack(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(losses, 1), -probabilities.log().gather(-1, targets[..., None])[..., 0])
    assert (probabilities - model.head.logits(hidden[-1]).softmax(-1)).abs().max() > 0.1, "copying moved nothing"


@torch.no_grad()
def test_a_fresh_model_copies_next_to_nothing() -> None:
    torch.manual_seed(5)
    model = build("transformer-xl", SMALL | {"copy": 512, "copy_width": 128}).eval()
    _, state = model.losses(text(2, 512), text(2, 512))
    tokens = text(2, 30)
    hidden, _ = model.hidden_states(tokens, state)
    plain, mixed = model.head.logits(hidden[-1]).softmax(-1), model(tokens, state)[0].exp()
    assert 0.001 < (plain - mixed).abs().max() < 0.02


def test_the_gradients_of_what_forward_says_are_those_of_the_losses() -> None:
    tokens, found = text(), []
    for way in ("losses", "logits"):
        model = make()
        if way == "losses":
            loss = model.losses(tokens[:, :12], tokens[:, 1:13])[0].mean()
        else:
            loss = F.cross_entropy(model(tokens[:, :12])[0].flatten(0, 1), tokens[:, 1:13].flatten())
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("ease", [-1e4, -100.0, 100.0, 1e4])
@torch.no_grad()
def test_however_sure_it_is_both_ways_say_the_same(ease: float) -> None:
    model, tokens = make(), text()
    model.copying.bias.fill_(ease)
    losses, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
    spoken = -model(tokens[:, :-1])[0].gather(-1, tokens[:, 1:, None])[..., 0]
    assert losses.isfinite().all()
    probable = losses < 600  # float64 has no probability below exp(-708)
    assert probable.any()
    torch.testing.assert_close(spoken[probable], losses[probable])


def test_what_is_copied_is_chosen_by_outputs_before_their_dropout() -> None:
    model, tokens, seen = make(output_dropout=0.5).train(), text(), []
    model.copying.query.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
    model.training_loss(tokens[:, :-1], tokens[:, 1:])
    model(tokens[:, :-1])
    plain, _ = make().hidden_states(tokens[:, :-1])
    assert len(seen) == 2
    for output in seen:
        torch.testing.assert_close(output, plain[-1].detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "values",
    [
        {"copy": 1, "layers": 1},
        {"copy": 7, "layers": 1},
        {"copy": 3, "memory": 4},
        {"copy": 2, "convolution": 2},
        {"copy": 6},
        {"copy": 5, "memory": 4, "same_length": True},
    ],
)
@torch.no_grad()
def test_reach_is_how_far_a_change_is_felt(values: dict[str, Any]) -> None:
    """Of all places of a segment: the farthest change felt lies exactly `reach` back."""
    model = make(**values)
    count = (model.reach // 6 + 4) * 6
    tokens = text(1, count + 1)
    changed = tokens[:, :-1].repeat(12, 1)
    changed.diagonal().add_(1).remainder_(9)

    def read(tokens: torch.Tensor) -> torch.Tensor:
        pieces, state = [], None
        for piece in tokens.split(6, dim=1):
            logits, state = model(piece, state)
            pieces.append(logits)
        return torch.cat(pieces, dim=1)

    moved = (read(changed) - read(tokens[:, :-1])).abs().amax(-1) > 1e-13
    assert max(int(row.nonzero().max()) - place for place, row in enumerate(moved)) == model.reach


def test_gradients_reach_queries_and_keys_within_the_segment_and_stop_at_what_was_kept() -> None:
    model = make().train()
    tokens = text()
    _, state = model.training_loss(tokens[:, :8], tokens[:, 1:9])
    assert not any(t.requires_grad for t in state.tensors().values())
    loss, _ = model.training_loss(tokens[:, 8:14], tokens[:, 9:15], state)
    loss.backward()
    for parameter in model.copying.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


def test_it_learns_to_copy_what_no_vocabulary_could_know() -> None:
    """Strings of eight drawn anew and said twice: the second time a copy is the only way to be surer than 1 in 24."""
    torch.manual_seed(0)
    shape = {"vocabulary": 24, "layers": 1, "width": 32, "heads": 2, "segment": 16, "memory": 1, "dropout": 0.0}
    model = build("transformer-xl", shape | {"convolution": 1, "copy": 16, "copy_width": 16})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(250):
        ids = torch.randint(24, (32, 8)).repeat(1, 2)
        losses, _ = model.losses(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    again, first = losses[:, 9:].mean().item(), losses[:, :7].mean().item()
    assert first == pytest.approx(3.18, abs=0.3), "what is drawn anew cannot be known"
    assert again < 1.0, f"{again:.2f} nats where all can be known"


def test_states_and_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StateError, match=r"no part 'copied'.*model\.copy"):
        make().losses(text(), text(), make(copy=0).initial_state(2))
    state = make().initial_state(2)
    hidden, tokens = state.parts["copied"]
    for wrong in ((hidden[..., :6], tokens), (hidden[:1], tokens[:1]), (hidden,), (hidden, tokens[:, 1:])):
        with pytest.raises(StateError, match=r"part 'copied' has the shapes .* \[2, C, 12\] and \[2, C, 1\]"):
            make().losses(text(), text(), replace(state, parts={**state.parts, "copied": wrong}))
    with pytest.raises(ConfigError, match=r"model\.copy=7 .*model\.memory=0"):
        make(memory=0)
    with pytest.raises(ConfigError, match=r"model\.copy=-1"):
        make(copy=-1)
    with pytest.raises(ConfigError, match=r"model\.copy=7 .*model\.copy_width=0"):
        make(copy_width=0)
    with pytest.raises(ConfigError, match=r"model\.copy_width=-1"):
        make(copy_width=-1)


@torch.no_grad()
def test_another_reach_reads_on_from_what_there_is() -> None:
    """A state of 7 places in a model that looks less far, further, or does not copy."""
    tokens = text()
    _, state = make().losses(tokens[:, :10], tokens[:, 1:11])
    others = {name: part for name, part in state.parts.items() if name != "copied"}
    for reach in (0, 3, 12):
        model = make(copy=reach)
        kept = tuple(F.pad(part, (0, 0, max(reach - 7, 0), 0))[:, -reach:] for part in state.parts["copied"])
        found, _ = model.losses(tokens[:, 10:19], tokens[:, 11:], state)
        fitting = replace(state, parts={**others, "copied": kept} if reach else others)
        expected, after = model.losses(tokens[:, 10:19], tokens[:, 11:], fitting)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert [part.shape[1] for part in after.parts.get("copied", ())] == ([reach] * 2 if reach else [])
        assert model.decoder(state, 2).step(tokens[:, 10]).isfinite().all()
