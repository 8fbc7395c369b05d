"""training.overlap: tokens before a segment are read again, without a loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.preflight import preflight
from longspan.training.recipe import build_recipe
from tests.training.conftest import Losses, make_recipe, make_text

CPU = torch.device("cpu")
TRAINING = {"steps": 5, "batch": 2, "segment": 8, "memory": 0, "overlap": 6, "lr": 0.01}


def test_losses_are_those_of_the_new_tokens_after_the_tokens_before_them() -> None:
    """A pass of four steps, each against one forward pass over [overlap; segment] with the weights of that step."""
    recipe = make_recipe(training_steps=6, training_memory=0, training_overlap=11, model_dropout=0.0)
    curve = Losses()
    _, trainer = run.make_trainer(recipe, make_text(129), CPU, [curve])
    preflight(trainer)
    ids = torch.from_numpy(trainer.streams.ids.astype("int64"))
    expected = []
    for step in range(6):
        first = step % 4 * 8
        rows = torch.arange(4)[:, None] * 32 + torch.arange(max(0, first - 11), first + 9)
        text, starts = ids[rows], torch.isin(rows[:, :-1], torch.from_numpy(trainer.streams.document_starts))
        with torch.no_grad():
            logits, _ = trainer.model(text[:, :-1], starts=starts)
        expected.append(F.cross_entropy(logits[:, -8:].transpose(1, 2), text[:, -8:]).item())
        trainer.take_step()
    trainer.settle()
    assert curve.curve == pytest.approx(expected, rel=1e-5)
    assert trainer.tokens == 6 * 4 * 8


FAMILIES: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "longspan-xl": {"ar": 0.1, "tar": 0.1},
    "rotary": {},
    "vanilla": {"layer_losses": True, "targets": 2},
    "universal": {"ponder": 0.1},
    "gpt": {},
    "sparse": {},
}
MEMORY = ("transformer-xl", "longspan-xl", "rotary")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_train_on_fewer_targets_than_tokens(name: str) -> None:
    """With targets for the last tokens only, losses are the same ones, and a step runs."""
    model = {"family": name, "layers": 2, "width": 16, "heads": 2, **FAMILIES[name]}
    training = {key: value for key, value in TRAINING.items() if key != "memory" or name in MEMORY}
    recipe = build_recipe({"model": model, "data": {}, "training": training, "evaluation": {}}, "small")
    _, trainer = run.make_trainer(recipe, make_text(100), CPU)
    preflight(trainer)
    trainer.take_step()
    trainer.take_step()
    trainer.settle()
    tokens = torch.arange(14)[None] % 50
    trainer.model.eval()
    with torch.no_grad():
        whole, _ = trainer.model.losses(tokens, tokens)
        found, _ = trainer.model.training_loss(tokens, tokens[:, -8:], None, 1.0)
    if name not in ("vanilla",):  # which adds losses of other layers
        assert found.item() == pytest.approx(whole[:, -8:].mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ({"family": "transformer-xl"}, {"memory": 8}, "state of the model; set training.memory=0"),
        ({"family": "lstm"}, {"memory": None}, "state of the model; leave it out"),
        ({"family": "xlnet"}, {}, "draws what it predicts"),
        ({"family": "bert"}, {"memory": None}, "draws what it predicts"),
        ({"family": "gpt", "positions": 10}, {"memory": None}, "training.overlap=6 needs segments of up to 14 tokens"),
        ({"family": "transformer-xl"}, {"overlap": -1}, "must not be negative"),
    ],
)
def test_an_overlap_that_cannot_work_is_refused(model: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    small = {"layers": 1, "width": 16} | ({} if model["family"] == "lstm" else {"heads": 2})
    training = {key: value for key, value in (TRAINING | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        check({"model": small | model, "data": {}, "training": training, "evaluation": {}})


def check(values: dict[str, Any]) -> None:
    preflight(run.make_trainer(build_recipe(values, "small"), make_text(100), CPU)[1])


def test_a_captured_step_has_the_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first segment of a pass has another shape."""
    recipe = make_recipe(training_steps=5, training_memory=0, training_overlap=8, model_dropout=0.0)
    plain = [Losses(), Losses()]
    for curve, captured in zip(plain, (False, True), strict=True):
        training = replace(recipe.training, cuda_graph=captured)
        _, trainer = run.make_trainer(replace(recipe, training=training), make_text(97), CPU, [curve])
        for _ in range(5):
            trainer.take_step()
        trainer.settle()
        assert [key[0] for key in trainer.captured] == ([torch.Size([4, 16])] if captured else [])
    assert plain[0].curve == plain[1].curve
