"""Concurrent readers of one model get the losses they would get alone: scoring never changes the model."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.scoring.contexts import context_losses
from longspan.scoring.losses import stream_losses
from longspan.scoring.score import score
from tests.support import build

IDS = np.random.default_rng(0).integers(17, size=30).astype(np.uint8)
TARGETS = np.arange(25, 30)
FAMILIES = ["transformer-xl", "longspan-xl", "compressive", "rotary"]


def make_model(family: str = "transformer-xl") -> LanguageModel:
    torch.manual_seed(2)
    made = build(family, {"vocabulary": 17, "layers": 1, "width": 16, "heads": 2, "segment": 6, "memory": 6})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made.double().eval()


def losses_of(model: LanguageModel) -> Any:
    return score(model, IDS, losses=True).losses


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_during_an_unfinished_measurement(family: str) -> None:
    model = make_model(family)
    alone = losses_of(model)
    next(context_losses(model, IDS, TARGETS, 25))
    np.testing.assert_array_equal(losses_of(model), alone)


def test_threads_share_a_model() -> None:
    model = make_model()
    alone = losses_of(model)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: losses_of(model), range(24)):
            np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_leaves_no_attribute_behind_in_any_module(family: str) -> None:
    """Tables of position keys live in the state, so there is nothing in the model that threads could share."""
    model = make_model(family)

    def attributes() -> list[tuple[str, str, int]]:
        return [(name, key, id(value)) for name, part in model.named_modules() for key, value in vars(part).items()]

    before, tensors = attributes(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses_of(model)
    list(context_losses(model, IDS, TARGETS, 25))
    assert attributes() == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("family", ["transformer-xl", "longspan-xl"])
def test_a_new_stream_uses_weights_that_have_changed(family: str) -> None:
    """Also where an older stream, with position keys of the old weights, is still open."""
    model = make_model(family)
    before, open_stream = losses_of(model), stream_losses(model, IDS, model.reading)
    next(open_stream)
    with torch.no_grad():
        position_projection(model).mul_(2)
    after = losses_of(model)
    assert not np.allclose(after, before)
    list(open_stream)
    np.testing.assert_array_equal(losses_of(model), after)


@pytest.mark.parametrize("family", ["transformer-xl", "longspan-xl"])
def test_gradients_reach_position_keys_after_inference(family: str) -> None:
    model = make_model(family)
    tokens = torch.from_numpy(IDS[None, :6].astype(np.int64))
    with torch.inference_mode():
        model.losses(tokens, tokens)
    model.losses(tokens, tokens, model.initial_state(1, trainable=True))[0].sum().backward()
    gradient = position_projection(model).grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def position_projection(model: Any) -> torch.nn.Parameter:
    """Wr of the first layer."""
    layer = model.layers[0]
    return layer.position.weight if hasattr(layer, "position") else layer.distances.projection.weight
