"""Captured steps, which read and write fixed buffers, compute the same as normal steps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longspan.cache.recurrent import LSTMCache
from longspan.checkpoints.states import restore_state
from longspan.contract import State
from longspan.cuda_graphs import CapturedStep
from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.loop import Trainer
from longspan.training.recipe import Recipe, build_recipe
from tests.support import build
from tests.training.conftest import Losses, make_recipe, make_text
from tests.training.test_resume import CONFIGURATIONS

CPU = torch.device("cpu")


def run_all(recipe: Recipe, tokens: int) -> tuple[list[float], Trainer]:
    torch.manual_seed(0)
    losses = Losses()
    _, trainer = run.make_trainer(recipe, make_text(tokens), CPU, [losses])
    trainer.run()
    return losses.curve, trainer


# One is captured already, one needs several captures, and two cannot be captured.
LEFT_OUT = ("CUDA graph", "schedules", "checkpointed activations", "segments of random length")


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in LEFT_OUT])
def test_captured_steps_equal_normal_steps(name: str) -> None:
    changes = dict(CONFIGURATIONS[name])
    tokens = changes.pop("tokens", 700)
    (normal, one), (captured, other) = (
        run_all(make_recipe(training_steps=12, **changes, training_cuda_graph=graph), tokens) for graph in (False, True)
    )
    np.testing.assert_allclose(captured, normal, rtol=1e-5)
    for first, second in zip(one.states, other.states, strict=True):
        for name, tensor in first.tensors().items():
            torch.testing.assert_close(second.tensors()[name], tensor, rtol=1e-4, atol=1e-5)
    assert other.captured


def test_another_shape_is_captured_again() -> None:
    changes = CONFIGURATIONS["schedules"] | {"training_steps": 12}
    tokens = changes.pop("tokens")
    normal, _ = run_all(make_recipe(**changes), tokens)
    captured, _ = run_all(make_recipe(**changes, training_cuda_graph=True), tokens)
    np.testing.assert_allclose(captured, normal, rtol=1e-5)


def test_a_captured_step_keeps_the_tensors_of_a_cache_apart() -> None:
    """Tensors of a resumed run may come in another order, and h and c of an LSTM have the same shape."""
    model = build("lstm", {"layers": 1, "width": 2, "segment": 8})
    saved = {"0.c": torch.full((1, 2), 3.0), "length": torch.zeros(1, dtype=torch.int64), "0.h": torch.ones(1, 2)}
    start = restore_state(model, saved, model.reading)

    def work(states: list[State]) -> tuple[torch.Tensor, list[State]]:
        (state,) = states
        (cache,) = state.caches
        return torch.zeros(()), [replace(state, caches=(LSTMCache(h=cache.h + 1, c=cache.c * 2),))]

    _, (state,) = CapturedStep(work)([start])
    assert [state.tensors()[name].tolist() for name in ("0.h", "0.c")] == [[[2.0, 2.0]], [[6.0, 6.0]]]


def small(family: str, clusters: tuple[int, ...] = (), **training: Any) -> Recipe:
    shape = {"family": family, "layers": 2, "width": 16, "cutoffs": list(clusters), "div_val": 2 if clusters else 1}
    return build_recipe(
        {"model": shape, "training": {"steps": 8, "batch": 4, "segment": 8, "lr": 0.01, **training}}, family
    )


@pytest.mark.parametrize("family", ["vanilla", "rotary"])
def test_other_graph_safe_families(family: str) -> None:
    normal, _ = run_all(small(family), 300)
    captured, trainer = run_all(small(family, cuda_graph=True), 300)
    np.testing.assert_allclose(captured, normal, rtol=1e-5)
    assert trainer.captured


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("checkpointed activations", r"training\.checkpoint_activations"),
        ("segments of random length", r"training\.segment_jitter=3\.0"),
    ],
)
def test_steps_that_are_not_static_are_refused(name: str, refused: str) -> None:
    changes = {key: value for key, value in CONFIGURATIONS[name].items() if key != "tokens"}
    with pytest.raises(ConfigError, match=rf"training\.cuda_graph=true.*{refused}"):
        make_recipe(**changes, training_cuda_graph=True)


def test_a_family_that_is_not_graph_safe_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.cuda_graph=true.* lstm "):
        run_all(small("lstm", cuda_graph=True), 300)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["transformer-xl", "rotary", "vanilla"])
def test_softmax_clusters_are_captured(family: str) -> None:
    """The number of tokens in a cluster is known on the device only."""
    normal, _ = run_all(small(family, (20, 60)), 300)
    captured, trainer = run_all(small(family, (20, 60), cuda_graph=True), 300)
    np.testing.assert_allclose(captured, normal, rtol=1e-2)
    assert trainer.captured
