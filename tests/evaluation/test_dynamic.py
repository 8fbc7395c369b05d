"""Dynamic evaluation: against a plain rewriting, and it never looks ahead."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from longspan.config import keys
from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.evaluation.dynamic import Dynamics, dynamic_losses
from longspan.evaluation.likelihood import stream_losses
from longspan.models import families
from longspan.models.families import build

SMALL = {"vocabulary": 17, "layers": 2, "width": 16, "heads": 2, "inner": 24, "segment": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "transformer-xl": {"memory": 12},
    "rotary": {"memory": 12},
    "vanilla": {},
    "compressive": {"memory": 8, "compressed": 4, "rate": 2},
    "lstm": {},
    "awd-lstm": {},
    "qrnn": {},
    "adaptive-span": {"span": 9, "ramp": 3},
    "universal": {"layers": 1, "steps": 4},
    "reformer": {"chunk": 4, "rounds": 2},
    "evolved": {},
    "sparse": {"stride": 3, "summary": 1},
    "longformer": {"window": 5},
    "bigbird": {"block": 2, "random_blocks": 1, "global_blocks": 1},
}


def make(family: str) -> LanguageModel:
    known = keys(families.family(family).Config)
    torch.manual_seed(4)
    return build(family, {key: SMALL[key] for key in SMALL if key in known} | FAMILIES[family]).double().eval()


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 17, count).astype(np.uint8)


def entries(stretches: Any, count: int) -> np.ndarray:
    out = np.full(count, np.nan)
    for stretch in stretches:
        out[stretch.begin : stretch.begin + len(stretch.losses)] = stretch.losses
    return out


def test_no_family_is_left_out() -> None:
    assert set(FAMILIES) == set(families.FAMILIES)


@pytest.mark.parametrize("begun", [(), (5, 16, 30)])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_rule_written_out(family: str, begun: tuple[int, ...]) -> None:
    """A copy of the model, torch's own backward pass and the update of each weight in turn; documents that begin."""
    model, ids = make(family), text(45)
    begins = np.array(begun, np.int64)
    got = entries(dynamic_losses(model, ids, segment=8, starts=begins, dynamics=Dynamics(0.01, 0.1)), 44)
    plain = copy.deepcopy(model)
    first = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    squares = {name: torch.zeros_like(weight) for name, weight in first.items()}
    plain.train()
    state = plain.initial_state(1)
    plain.eval()
    wanted = []
    for step, begin in enumerate(range(0, 44, 8), start=1):
        end = min(begin + 8, 44)
        tokens, targets = (
            torch.from_numpy(ids[a:b].astype(np.int64))[None] for a, b in ((begin, end), (begin + 1, end + 1))
        )
        starts = torch.tensor([[place in begun for place in range(begin, end)]]) if begun else None
        losses, state = plain.losses(tokens, targets, state, starts)
        state = state.detach()
        wanted.append(losses[0].detach().numpy())
        plain.zero_grad()
        losses.mean().backward()
        for name, weight in plain.named_parameters():
            if weight.grad is None:
                continue
            squares[name] += weight.grad**2
            moved = weight.detach() - 0.01 * weight.grad / ((squares[name] / step) ** 0.5 + 1e-8)
            weight.data = moved + 0.1 * (first[name] - weight.detach())
    np.testing.assert_allclose(got, np.concatenate(wanted), atol=1e-6)


def test_it_learns_only_from_what_was_scored_and_leaves_no_trace() -> None:
    model, ids = make("transformer-xl"), text(65)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    static = entries(stream_losses(model, ids, segment=8), 64)
    moving = entries(dynamic_losses(model, ids, segment=8, dynamics=Dynamics(0.01)), 64)
    np.testing.assert_allclose(moving[:8], static[:8], atol=1e-6)
    assert np.abs(moving[8:] - static[8:]).min() > 0
    other = ids.copy()
    other[41:] = text(24, seed=9)
    again = entries(dynamic_losses(model, other, segment=8, dynamics=Dynamics(0.01)), 64)
    np.testing.assert_array_equal(again[:40], moving[:40])
    assert np.abs(again[41:] - moving[41:]).max() > 1e-3
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None
    unfinished = dynamic_losses(model, ids, segment=8, dynamics=Dynamics(0.01))
    for _ in range(3):
        next(unfinished)
    unfinished.close()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_it_gains_on_a_text_that_repeats_itself() -> None:
    model, ids = make("transformer-xl").float(), np.tile(text(23), 60)
    static = entries(stream_losses(model, ids, segment=8), len(ids) - 1)
    moving = entries(dynamic_losses(model, ids, segment=8, dynamics=Dynamics(2e-3)), len(ids) - 1)
    assert moving.mean() < 0.7 * static.mean()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["transformer-xl", "rotary", "vanilla", "compressive"])
def test_a_gpu_follows_a_text_as_a_cpu_does(family: str) -> None:
    """Recorded where it can be; the last segment is shorter, and products may be of bfloat16."""
    model, ids = make(family), text(20 * 8 + 4)
    wanted = entries(dynamic_losses(model, ids, segment=8, dynamics=Dynamics(0.01, 0.1)), 163)
    model = model.float().cuda()
    for products, atol in ((None, 2e-3), (torch.bfloat16, 0.1)):
        got = entries(dynamic_losses(model, ids, segment=8, dynamics=Dynamics(0.01, 0.1), products=products), 163)
        np.testing.assert_allclose(got, wanted, atol=atol)


@pytest.mark.parametrize(("rate", "decay"), [(0.0, 0.0), (float("nan"), 0.0), (2.0, 0.0), (0.1, 1.0), (0.1, -0.1)])
def test_wrong_settings_are_told(rate: float, decay: float) -> None:
    with pytest.raises(ConfigError, match="--dynamic-"):
        Dynamics(rate, decay)
