"""Dynamic evaluation: equals a plain implementation of the rule, and never learns from unscored text."""

import copy
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longspan.config import keys
from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.models import families
from longspan.scoring.dynamic import Dynamics, Learner, dynamic_losses, static_reading
from longspan.scoring.losses import Chunk, stream_losses
from longspan.scoring.score import score
from tests.support import READING, build

SMALL = {"vocabulary": 17, "layers": 2, "width": 16, "heads": 2, "inner": 24, "segment": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "transformer-xl": {"memory": 12},
    "longspan-xl": {"memory": 12},
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
    "gpt": {},
    "xlnet": {"memory": 12},
    "elmo": {"inner": None},
}


def make_model(family: str) -> LanguageModel:
    known = {*keys(families.family(family).Config), *READING}
    torch.manual_seed(4)
    return build(family, {key: SMALL[key] for key in SMALL if key in known} | FAMILIES[family]).double().eval()


def make_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 17, count).astype(np.uint8)


@torch.no_grad()
def first_logits(model: LanguageModel, ids: np.ndarray) -> torch.Tensor:
    logits, _ = model(torch.from_numpy(ids[None, :8]).long(), model.initial_state(1))
    return logits


def collect(chunks: Iterable[Chunk], count: int) -> np.ndarray:
    out = np.full(count, np.nan)
    for chunk in chunks:
        out[chunk.begin : chunk.begin + len(chunk.losses)] = chunk.losses
    return out


def test_every_family_is_tested() -> None:
    trained = {name for name in families.known_families() if families.family(name).predicts_next}
    assert set(FAMILIES) == trained


@pytest.mark.parametrize("documents", [(), (5, 16, 30)])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_equal_a_plain_implementation(family: str, documents: tuple[int, ...]) -> None:
    """A copy of the model, a backward pass per segment and one update per weight; with and without document starts."""
    model, ids = make_model(family), make_ids(45)
    reading, offsets = model.reading, np.array(documents, np.int64)
    got = collect(dynamic_losses(model, ids, reading, starts=offsets, dynamics=Dynamics(0.01, 0.1)), 44)
    plain = copy.deepcopy(model)
    first = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    squares = {name: torch.zeros_like(weight) for name, weight in first.items()}
    state = plain.initial_state(1, trainable=True)
    expected = []
    for step, begin in enumerate(range(0, 44, 8), start=1):
        end = min(begin + 8, 44)
        tokens, targets = (
            torch.from_numpy(ids[a:b].astype(np.int64))[None] for a, b in ((begin, end), (begin + 1, end + 1))
        )
        starts = torch.tensor([[place in documents for place in range(begin, end)]]) if documents else None
        losses, state = plain.losses(tokens, targets, state, starts)
        state = state.detach()
        expected.append(losses[0].detach().numpy())
        plain.zero_grad()
        losses.mean().backward()
        for name, weight in plain.named_parameters():
            if weight.grad is None:
                continue
            squares[name] += weight.grad**2
            moved = weight.detach() - 0.01 * weight.grad / ((squares[name] / step) ** 0.5 + 1e-8)
            weight.data = moved + 0.1 * (first[name] - weight.detach())
    np.testing.assert_allclose(got, np.concatenate(expected), atol=1e-6)


def test_weights_follow_scored_text_only_and_are_restored() -> None:
    model, ids = make_model("transformer-xl"), make_ids(65)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    static = collect(stream_losses(model, ids, model.reading), 64)
    moving = collect(dynamic_losses(model, ids, model.reading, dynamics=Dynamics(0.01)), 64)
    np.testing.assert_allclose(moving[:8], static[:8], atol=1e-6)
    assert np.abs(moving[8:] - static[8:]).min() > 0
    other = ids.copy()
    other[41:] = make_ids(24, seed=9)
    again = collect(dynamic_losses(model, other, model.reading, dynamics=Dynamics(0.01)), 64)
    np.testing.assert_array_equal(again[:40], moving[:40])
    assert np.abs(again[41:] - moving[41:]).max() > 1e-3
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None
    unfinished = dynamic_losses(model, ids, model.reading, dynamics=Dynamics(0.01))
    for _ in range(3):
        next(unfinished)
    unfinished.close()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("documents", [(), (50, 160, 161)])
@pytest.mark.parametrize("family", ["transformer-xl", "longspan-xl", "rotary"])
def test_the_static_score_in_long_segments_is_the_same(family: str, documents: tuple[int, ...]) -> None:
    model, ids, starts = make_model(family), make_ids(300), np.array(documents, np.int64)
    short = replace(model.reading, same_length=True)
    long = static_reading(short, torch.device("cuda"))
    assert (short.segment, long.segment) == (8, 4096)
    assert replace(long, segment=8) == short
    losses = [collect(stream_losses(model, ids, reading, starts=starts), 299) for reading in (short, long)]
    np.testing.assert_allclose(*losses, atol=1e-6)


def test_segments_that_change_losses_or_cost_more_stay_short() -> None:
    reading, gpu = replace(make_model("longspan-xl").reading, same_length=True), torch.device("cuda")
    assert static_reading(reading, torch.device("cpu")) == reading
    for kept in (replace(reading, same_length=False), replace(reading, pointer=5), replace(reading, segment=9000)):
        assert static_reading(kept, gpu) == kept


def test_losses_fall_on_a_text_that_repeats() -> None:
    model, ids = make_model("transformer-xl").float(), np.tile(make_ids(23), 60)
    static = collect(stream_losses(model, ids, model.reading), len(ids) - 1)
    moving = collect(dynamic_losses(model, ids, model.reading, dynamics=Dynamics(2e-3)), len(ids) - 1)
    assert moving.mean() < 0.7 * static.mean()


def test_a_bfloat16_model_learns_with_float32_weights() -> None:
    """Updates of 1e-5 are lost in bfloat16 weights. The model itself does not change."""
    model, ids = make_model("transformer-xl").bfloat16(), make_ids(65)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    dynamics, wide = Dynamics(1e-5), copy.deepcopy(model).float()
    expected = collect(dynamic_losses(wide, ids, model.reading, dynamics=dynamics, precision=torch.bfloat16), 64)
    got = collect(dynamic_losses(model, ids, model.reading, dynamics=dynamics), 64)
    np.testing.assert_array_equal(got, expected)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name])


def test_score_sees_every_update_with_bfloat16_products() -> None:
    """Autocast keeps rounded weights until the outermost one exits, so within another it could miss updates."""
    model, ids = make_model("transformer-xl").float(), make_ids(65)
    options: dict[str, Any] = {"dynamics": Dynamics(1e-2), "precision": torch.bfloat16}
    expected = collect(dynamic_losses(model, ids, model.reading, **options), 64)
    found = score(model, ids, method="dynamic", losses=True, **options)
    np.testing.assert_array_equal(found.losses, expected)
    with torch.autocast("cpu", torch.bfloat16):
        before = first_logits(model, ids)
        np.testing.assert_array_equal(collect(dynamic_losses(model, ids, model.reading, **options), 64), expected)
        assert torch.equal(first_logits(model, ids), before)  # those of the old weights, not of a cast of the last ones


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["transformer-xl", "rotary", "vanilla", "compressive"])
def test_losses_on_a_gpu_equal_those_on_a_cpu(family: str) -> None:
    """With a CUDA graph where possible; the last segment is shorter, and matrix products may be bfloat16."""
    model, ids = make_model(family), make_ids(20 * 8 + 4)
    expected = collect(dynamic_losses(model, ids, model.reading, dynamics=Dynamics(0.01, 0.1)), 163)
    model = model.float().cuda()
    for precision, atol in ((None, 2e-3), (torch.bfloat16, 0.1)):
        got = collect(dynamic_losses(model, ids, model.reading, dynamics=Dynamics(0.01, 0.1), precision=precision), 163)
        np.testing.assert_allclose(got, expected, atol=atol)


@pytest.mark.parametrize(("rate", "decay"), [(0.0, 0.0), (float("nan"), 0.0), (2.0, 0.0), (0.1, 1.0), (0.1, -0.1)])
def test_settings_out_of_range_are_refused(rate: float, decay: float) -> None:
    with pytest.raises(ConfigError, match=r"^(rate|decay)=[-\d.n]"):
        Dynamics(rate, decay)


@pytest.mark.torture
def test_one_compilation_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers give the same losses and updates, and the model is left as it was."""
    compiled = []

    def record(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    compiler = functools.partial(torch.compile, backend=record)
    monkeypatch.setattr(torch, "compile", compiler)
    learners = [Learner(make_model("longspan-xl"), Dynamics(0.01)) for _ in range(2)]
    tokens, targets = torch.from_numpy(make_ids(2 * 8, seed=3).astype(np.int64)).view(2, 1, 8).unbind()
    state = learners[0].model.initial_state(1, trainable=True, filled=True)
    for _ in range(2):
        expected, _ = learners[0].step([state], tokens, targets, None)
        got, _ = learners[1].compiled_step([state], tokens, targets, None)
        torch.testing.assert_close(got, expected)
    assert len(learners[1].model.layers) == 2
    assert len(compiled) == 1
    assert not any("forward" in vars(layer) for layer in learners[1].model.layers)
