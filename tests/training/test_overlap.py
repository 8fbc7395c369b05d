"""training.overlap: tokens before a segment are read again, without a loss."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from longspan.errors import ConfigError
from longspan.training import loop, run
from longspan.training.preflight import preflight
from longspan.training.recipe import build_recipe, load_recipe
from tests.training.conftest import Losses, make_recipe, make_text

CPU = torch.device("cpu")
TRAINING = {"steps": 5, "batch": 2, "segment": 8, "memory": 0, "overlap": 6, "lr": 0.01}


def test_losses_are_those_of_the_new_tokens_after_the_tokens_before_them() -> None:
    """A pass of four steps, each against one forward pass over [overlap; segment] with the weights of that step."""
    shape = {"model_family": "longspan-xl", "model_dropout": 0.0}
    recipe = make_recipe(training_steps=6, training_memory=0, training_overlap=11, **shape)
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
            logits, _ = trainer.model(text[:, :-1], trainer.model.initial_state(4, trainer.reading), starts)
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
        ({"family": "transformer-xl"}, {"memory": 8}, "state of the model; set training.memory=0, or"),
        ({"family": "lstm"}, {"memory": None}, "state of the model; leave it out"),
        ({"family": "xlnet"}, {}, "chooses what it predicts"),
        ({"family": "bert"}, {"memory": None}, "chooses what it predicts"),
        ({"family": "gpt", "positions": 10}, {"memory": None}, "segment=14 is longer than the 10 learned positions"),
        ({"family": "transformer-xl"}, {"overlap": -1}, "must not be negative"),
        ({"family": "transformer-xl"}, {"overlap": 10**9}, "training.overlap=1000000000"),
    ],
)
def test_an_overlap_that_cannot_work_is_refused(model: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    small = {"layers": 1, "width": 16} | ({} if model["family"] == "lstm" else {"heads": 2})
    training = {key: value for key, value in (TRAINING | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        check({"model": small | model, "data": {}, "training": training, "evaluation": {}})


def check(values: dict[str, Any]) -> None:
    preflight(run.make_trainer(build_recipe(values, "small"), make_text(100), CPU)[1])


def test_a_step_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three passes over one document: the start of a row that is read again is no start of a document."""
    recipe = make_recipe(training_memory=0, training_overlap=8, model_dropout=0.0)
    text = replace(make_text(97), starts=np.zeros(1, np.int64))
    created, captured_step, plain = [], loop.CapturedStep, [Losses(), Losses()]
    monkeypatch.setattr(loop, "CapturedStep", lambda *given: created.append(1) or captured_step(*given))
    for curve, captured in zip(plain, (False, True), strict=True):
        training = replace(recipe.training, cuda_graph=captured)
        _, trainer = run.make_trainer(replace(recipe, training=training), text, CPU, [curve])
        for _ in range(9):
            trainer.take_step()
        trainer.settle()
        assert [key[0] for key in trainer.captured] == ([torch.Size([4, 16])] if captured else [])
    assert len(created) == 1
    assert plain[0].curve == plain[1].curve


def test_an_overlap_longer_than_the_text_reads_the_whole_row() -> None:
    recipe = make_recipe(training_steps=3, training_memory=0, training_overlap=10**6)
    _, trainer = run.make_trainer(recipe, make_text(97), CPU)
    preflight(trainer)
    for _ in range(3):
        trainer.take_step()
    assert trainer.tokens == 3 * 4 * 8


def test_distances_of_the_overlap_are_those_of_training() -> None:
    recipe = load_recipe("ptb-transformer-xl")
    reading = recipe.evaluation_reading()
    assert recipe.longest_distance == reading.clamp == reading.memory == 139
    plain = make_recipe(training_memory=0, training_overlap=5).evaluation_reading()
    assert (plain.segment, plain.clamp) == (13, 12)
