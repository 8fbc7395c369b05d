"""A step that reads from and writes to fixed places, as a recorded one must, is the step it was."""

from typing import Any

import numpy as np
import pytest
import torch

from longspan.contract import State
from longspan.errors import ConfigError
from longspan.memory.recording import RecordedStep
from longspan.models.families import outline
from longspan.training import run
from longspan.training.loop import Trainer
from longspan.training.recipe import Recipe, build_recipe
from tests.training.conftest import Losses, make_recipe, make_text
from tests.training.test_resume import CONFIGURATIONS

CPU = torch.device("cpu")


def take(recipe: Recipe, tokens: int) -> tuple[list[float], Trainer]:
    torch.manual_seed(0)
    losses = Losses()
    _, trainer = run.make_trainer(recipe, make_text(tokens), CPU, [losses])
    trainer.run()
    return losses.curve, trainer


# One has nothing new, one needs several recordings, and two cannot be recorded.
LEFT_OUT = ("recorded", "schedules", "checkpointed activations", "segments of random length")


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in LEFT_OUT])
def test_recorded_steps_are_the_steps(name: str) -> None:
    changes = dict(CONFIGURATIONS[name])
    tokens = changes.pop("tokens", 700)
    (plain, one), (recorded, other) = (
        take(make_recipe(training_steps=12, **changes, training_record=record), tokens) for record in (False, True)
    )
    np.testing.assert_allclose(recorded, plain, rtol=1e-5)
    for mine, his in zip(one.states, other.states, strict=True):
        for name, tensor in mine.tensors().items():
            torch.testing.assert_close(his.tensors()[name], tensor, rtol=1e-4, atol=1e-5)
    assert other.recording is not None


def test_another_shape_is_another_recording() -> None:
    changes = CONFIGURATIONS["schedules"] | {"training_steps": 12}
    tokens = changes.pop("tokens")
    plain, _ = take(make_recipe(**changes), tokens)
    recorded, _ = take(make_recipe(**changes, training_record=True), tokens)
    np.testing.assert_allclose(recorded, plain, rtol=1e-5)


def test_a_recording_knows_the_parts_of_a_state_by_name() -> None:
    """Those of a resumed run may come in another order, and those of an LSTM have one shape."""
    length, h, c = torch.ones(1, dtype=torch.int64), torch.ones(1, 2), torch.full((1, 2), 3.0)

    def work(states: list[State]) -> tuple[torch.Tensor, list[State]]:
        (state,) = states
        (before,), (kept,) = state.parts["h"], state.parts["c"]
        return torch.zeros(()), [State(state.length, {"h": (before + 1,), "c": (kept * 2,)})]

    _, (state,) = RecordedStep(work)([State(length, {"c": (c,), "h": (h,)})])
    assert [state.parts[name][0].tolist() for name in ("h", "c")] == [[[2.0, 2.0]], [[6.0, 6.0]]]


def small(family: str, **training: Any) -> Recipe:
    shape = {"family": family, "layers": 2, "width": 16, "segment": 8}
    return build_recipe({"model": shape, "training": {"steps": 8, "batch": 4, "lr": 0.01, **training}}, family)


@pytest.mark.parametrize("family", ["vanilla", "rotary"])
def test_other_families_that_say_so(family: str) -> None:
    plain, _ = take(small(family), 300)
    recorded, trainer = take(small(family, record=True), 300)
    np.testing.assert_allclose(recorded, plain, rtol=1e-5)
    assert trainer.recording is not None


@pytest.mark.parametrize("name", ["checkpointed activations", "segments of random length"])
def test_what_cannot_be_replayed_is_refused(name: str) -> None:
    changes = {key: value for key, value in CONFIGURATIONS[name].items() if key != "tokens"}
    with pytest.raises(ConfigError, match="replays one step"):
        make_recipe(**changes, training_record=True)


def test_a_family_that_does_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="a step of lstm cannot be recorded"):
        take(small("lstm", record=True), 300)


@pytest.mark.parametrize("family", ["transformer-xl", "rotary", "vanilla"])
def test_clusters_of_the_softmax_are_refused(family: str) -> None:
    """How many tokens fall into a cluster is known only from the data, and so are shapes in a step."""
    shape = {"family": family, "layers": 1, "width": 16, "segment": 8, "vocabulary": 256}
    training = {"steps": 8, "record": True}
    with pytest.raises(ConfigError, match=r"training\.record=true.*model\.cutoffs=\[20, 60\]"):
        build_recipe({"model": shape | {"cutoffs": [20, 60]}, "training": training}, family)
    recipe = build_recipe({"model": shape | {"cutoffs": [20, 60]}, "training": training | {"record": False}}, family)
    assert not outline(family, recipe.model).recordable
    assert outline(family, build_recipe({"model": shape, "training": training}, family).model).recordable
