"""Readers that share a model, in threads or taking turns, get the numbers they would get alone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.evaluation.contexts import context_losses
from longspan.evaluation.likelihood import stream_losses
from longspan.layers.positions import SinusoidDistances
from longspan.models.families import build
from longspan.shapes import Tensor

IDS = np.random.default_rng(0).integers(17, size=30).astype(np.uint8)
TARGETS = np.arange(25, 30)


def build_model(family: str = "transformer-xl") -> LanguageModel:
    torch.manual_seed(2)
    values = {"vocabulary": 17, "layers": 1, "width": 16, "heads": 2, "segment": 6, "memory": 6}
    made = build(family, values)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made.double().eval()


def score(model: LanguageModel) -> np.ndarray:
    return np.concatenate([stretch.losses for stretch in stream_losses(model, IDS, segment=6)])


@pytest.mark.parametrize("family", ["transformer-xl", "compressive", "rotary"])
def test_a_score_while_contexts_are_being_measured(family: str) -> None:
    model = build_model(family)
    alone = score(model)
    measuring = context_losses(model, IDS, TARGETS, 25)
    next(measuring)  # it has begun and has not ended
    np.testing.assert_array_equal(score(model), alone)


def test_threads() -> None:
    model = build_model()
    alone = score(model)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: score(model), range(24)):
            np.testing.assert_array_equal(found, alone)


def test_another_thread_leaves_at_the_worst_moment() -> None:
    """What is kept is cleared between two looks at it, as a thread that enters or leaves may do."""

    class Cleared(SinusoidDistances):
        @property
        def _kept(self) -> Tensor | None:  # type: ignore[override]
            kept, looks = self.__dict__["kept"]
            self.__dict__["kept"] = (kept if looks < 1 else None, looks + 1)
            return kept

        @_kept.setter
        def _kept(self, value: Tensor | None) -> None:
            self.__dict__["kept"] = (value, 0)

    model = build_model()
    alone = score(model)
    model.layers[0].distances.__class__ = Cleared  # type: ignore[union-attr,index,assignment]
    np.testing.assert_array_equal(score(model), alone)


def test_nothing_is_kept_once_all_have_left() -> None:
    """Weights that moved after the last block are used, also where blocks overlapped."""
    model = build_model()
    first, second = model.fixed_weights(), model.fixed_weights()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    score(model)
    second.__exit__(None, None, None)
    before = score(model)
    with torch.no_grad():
        model.layers[0].distances.projection.weight.mul_(2)  # type: ignore[union-attr,index]
    assert not np.allclose(score(model), before)


def test_a_gradient_beside_fixed_weights() -> None:
    model = build_model()
    tokens = torch.from_numpy(IDS[None, :6].astype(np.int64))
    with model.fixed_weights():
        with torch.inference_mode():
            model.losses(tokens, tokens)
        model.losses(tokens, tokens)[0].sum().backward()
    assert model.layers[0].distances.projection.weight.grad.abs().sum() > 0  # type: ignore[union-attr,index]
