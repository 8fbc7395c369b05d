"""Trainer of `transformers` with memory carried across batches."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from tests.training.conftest import make_recipe, make_text

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainingArguments

import longspan.hf as hf

STEPS = 6


class Losses(Observer):
    def __init__(self) -> None:
        self.values: list[float] = []

    def row(self, trainer: Trainer, row: Row) -> None:
        self.values.append(row.loss)


def own_trainer(**changes: Any) -> tuple[Trainer, Losses]:
    recipe = make_recipe(
        model_dropout=0.0,
        training_steps=STEPS,
        training_schedule="constant",
        training_warmup=0,
        training_spike=0.0,
        **changes,
    )
    seen = Losses()
    _, trainer = run.make_trainer(recipe, make_text(), torch.device("cpu"))
    trainer.observers.append(seen)
    return trainer, seen


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "prediction_loss_only": True,
    }
    return TrainingArguments(str(out), **(values | changes))


def dataset(rows: int = 4, segment: int = 8) -> hf.StreamDataset:
    text = make_text()
    return hf.StreamDataset(text.ids, rows, segment, text.starts)


def logged(trainer: hf.MemoryTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("family", ["longspan-xl", pytest.param("compressive", marks=pytest.mark.torture)])
def test_losses_equal_those_of_our_training_loop(family: str, tmp_path: Path) -> None:
    """The same weights, data and optimizer. The loss of `compressive` has a further term. Documents start in the text,
    and a pass ends after 22 steps, so the memory is reset there."""
    ours, seen = own_trainer(model_family=family)
    theirs = hf.MemoryTrainer(
        hf.LongspanForCausalLM.of(deepcopy(ours.model)), arguments(tmp_path), train_dataset=dataset()
    )
    theirs.train()
    ours.run()
    np.testing.assert_allclose(logged(theirs), seen.values, rtol=0, atol=2e-5)  # the log has four to five digits
    assert theirs.memory is not None
    assert int(theirs.memory.state.length.max()) > 8, "the memory is longer than a segment"


def test_a_resumed_run_continues_with_its_memory(tmp_path: Path) -> None:
    def make(out: str, **changes: Any) -> hf.MemoryTrainer:
        torch.manual_seed(0)
        trainer, _ = own_trainer()
        model = hf.LongspanForCausalLM.of(trainer.model)
        return hf.MemoryTrainer(model, arguments(tmp_path / out, **changes), train_dataset=dataset())

    whole = make("a", save_strategy="steps", save_steps=3)
    whole.train()
    resumed = make("b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert logged(resumed)[-3:] == logged(whole)[-3:]


def test_evaluation_carries_a_memory_of_its_own(tmp_path: Path) -> None:
    trainer, _ = own_trainer()
    model = hf.LongspanForCausalLM.of(trainer.model.eval())
    data = dataset()
    found = hf.MemoryTrainer(model, arguments(tmp_path), eval_dataset=data).evaluate()["eval_loss"]
    state, losses = model.model.initial_state(4, trainable=False), []
    with torch.no_grad():
        for begin in range(0, len(data), 4):
            batch = {k: torch.stack([data[begin + row][k] for row in range(4)]) for k in data[0]}
            loss, state = model.model.losses(batch["input_ids"], batch["targets"], state, batch["starts"])
            losses.append(float(loss.mean()))
    assert found == pytest.approx(np.mean(losses), abs=1e-6)


def test_batches_that_do_not_continue_are_refused(tmp_path: Path) -> None:
    trainer, _ = own_trainer()
    model = hf.LongspanForCausalLM.of(trainer.model)
    with pytest.raises(ConfigError, match=r"3 rows.*4"):
        hf.MemoryTrainer(model, arguments(tmp_path), train_dataset=dataset(rows=3)).train()
    with pytest.raises(ConfigError, match=r"StreamDataset.*list"):
        hf.MemoryTrainer(model, arguments(tmp_path), train_dataset=[dataset()[0]]).train()
