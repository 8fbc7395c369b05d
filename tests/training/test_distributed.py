"""A run does not depend on the number of its processes: losses, weights, memory, data position and random state."""

import dataclasses
import errno
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.checkpoints import store
from longspan.config import keys
from longspan.errors import CheckpointError, ConfigError, DataError, LongspanError
from longspan.models.families import family
from longspan.tokenizers import ByteTokenizer
from longspan.training import nodes, run
from longspan.training.folder import locked
from longspan.training.processes import ALONE, OtherProcessError, Processes
from longspan.training.recipe import Recipe, build_recipe
from tests.contract.conftest import ALL, SMALL
from tests.training.conftest import losses, make_recipe, make_text, run_in_process, train
from tests.training.processes import on_processes, tensors

READING = {"segment", "memory", "clamp", "same_length", "pointer"}
EVERYTHING = bool(os.environ.get("LONGSPAN_TORTURE"))
STEPS = 20 if EVERYTHING else 12
# Those whose loss, gradient or random numbers are not the same for every row.
VARIANTS = ["regularised", "lstm-adaptive", "adaptive-span", "compressive-convolution", "bigbird", "xlnet"]


def recipe_of(name: str, rate: float = 0.2, **training: Any) -> Recipe:
    """A variant of the contract suite as a recipe, with dropout everywhere."""
    chosen, values = ALL[name]
    known = {*keys(family(chosen).Config), *READING}
    model: dict[str, Any] = {key: value for key, value in SMALL.items() if key in known} | values
    rates = [key for key in known if key == "dropout" or key.endswith("_dropout")]
    model |= dict.fromkeys(rates, rate)
    for key in ("vocabulary", "discount"):  # a discount is for evaluation
        model.pop(key, None)
    reading = {key: model.pop(key) for key in READING & set(model)}
    if "memory" in reading:
        reading["memory"] = min(reading["memory"], 12)
    values = {"steps": STEPS, "batch": 4, "lr": 0.003, "clip": 0.5, "warmup": 2, **reading, **training}
    return build_recipe({"model": {"family": chosen, **model}, "training": values}, name)


def curve(recipe: Recipe, processes: Processes) -> list[float]:
    _, trainer = run.make_trainer(recipe, make_text(700), torch.device("cpu"), (), processes)
    found: list[float] = []
    trainer._report = lambda rows: found.extend(row.loss for row in rows)  # type: ignore[method-assign]
    for _ in range(STEPS):
        trainer.take_step()
    return found


def cases() -> dict[str, Recipe]:
    """All families and variants in `make torture`, in both forms; else those that differ in how they are divided."""
    names = list(ALL) if EVERYTHING else VARIANTS
    double = {name: recipe_of(name, precision="float64") for name in names}
    double["accumulated"] = recipe_of("regularised", precision="float64", accumulate=2, checkpoint_activations=True)
    double["sgd"] = recipe_of(
        "plain",
        precision="float64",
        optimizer="sgd",
        lr=0.3,
        averaging="ema",
        locked_dropout=True,
        weight_dropout=0.1,
    )
    for optimizer in ("adamw", "muon"):
        double[f"fsdp {optimizer}"] = recipe_of("adaptive", precision="float64", optimizer=optimizer, parallel="fsdp")
    double["muon"] = recipe_of("longspan", precision="float64", optimizer="muon", batch=[[0, 4], [7, 8]])
    double["fsdp parts"] = recipe_of(
        "pointer", precision="float64", accumulate=2, checkpoint_activations=True, parallel="fsdp"
    )
    # A layer of compressive has a second loss, which FSDP must gather its weights for.
    sharded = names if EVERYTHING else ["bert", "compressive-convolution"]
    double |= {f"fsdp {name}": recipe_of(name, precision="float64", parallel="fsdp") for name in sharded}
    single = names if EVERYTHING else ["plain", "compressive-convolution"]
    return {f"float64 {name}": recipe for name, recipe in double.items()} | {
        f"float32 {name}": recipe_of(name, precision="float32") for name in single
    }


def compare_losses(folder: str) -> None:
    """The losses of all cases on one process and on several, as a file for the test."""
    importlib.import_module("torch._dynamo")  # optimizers would import it in every child
    recipes = cases()

    def work(processes: Processes) -> None:
        found = {name: curve(recipe, processes) for name, recipe in recipes.items()}
        if processes.is_first:
            Path(folder, f"{processes.size if processes.distributed else 0}.json").write_text(json.dumps(found))

    for size in (0, 2, 4) if EVERYTHING else (0, 2):
        assert on_processes(size, work) == [0] * max(size, 1)


def test_every_variant_can_be_compared() -> None:
    for name in ALL:
        recipe_of(name)


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    assert run_in_process(compare_losses, str(tmp_path), timeout=None if EVERYTHING else 300) == 0
    alone, *others = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert others
    bounds = {"float64": 1e-10, "float32": 1e-5}
    different = {
        name: difference
        for divided in others
        for name, expected in alone.items()
        if not (difference := np.abs(np.subtract(divided[name], expected)).max()) <= bounds[name.split()[0]]
    }
    assert not different
    # The tokens that xlnet and bert predict differ from step to step, so a single loss may rise.
    assert [name for name, expected in alone.items() if not np.mean(expected[-5:]) < np.mean(expected[:5])] == []


class OddBytes(ByteTokenizer):
    """A vocabulary that no number of processes divides."""

    size = 257


def checked_recipe(steps: int, parallel: str = "ddp") -> Recipe:
    """Dropout, documents, memory and parts."""
    return make_recipe(
        training_steps=steps,
        training_schedule="constant",
        training_batch=8,
        training_accumulate=2,
        training_save_every=4,
        training_optimizer="muon",
        training_parallel=parallel,
    )


def resume_on_others(folder: str) -> None:
    importlib.import_module("torch._dynamo")
    patch = pytest.MonkeyPatch()
    text = dataclasses.replace(make_text(700), tokenizer=OddBytes())

    def train_in(name: str, steps: int, parallel: str = "ddp", **options: Any) -> Callable[[Processes], object]:
        out = Path(folder, name)

        def work(processes: Processes) -> None:
            train(checked_recipe(steps, parallel), out, text, patch, processes=processes, **options)

        return work

    assert on_processes(0, train_in("alone", 12)) == [0]
    assert on_processes(2, train_in("two", 12)) == [0, 0]
    # Uninterrupted, and stopped and resumed on as many processes.
    assert on_processes(2, train_in("again", 7)) == [0, 0]
    assert on_processes(2, train_in("again", 12, resume="auto")) == [0, 0]
    # On four processes with sharded weights, then two, then one that torchrun has not started.
    for size, steps in ((4, 4), (2, 8), (0, 12)):
        assert on_processes(size, train_in("fewer", steps, "fsdp", resume="auto")) == [0] * max(size, 1)


def test_a_run_resumes_on_any_number_of_processes(tmp_path: Path) -> None:
    assert run_in_process(resume_on_others, str(tmp_path)) == 0
    alone, two, again, fewer = (tmp_path / name for name in ("alone", "two", "again", "fewer"))
    for other in (two, again, fewer):
        assert losses(other) == pytest.approx(losses(alone), rel=0, abs=1e-5)
    expected, found = (tensors(out / "checkpoint-12") for out in (two, again))
    assert expected.keys() == found.keys() == tensors(alone / "checkpoint-12").keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert losses(again) == losses(two)
    for name, tensor in tensors(alone / "checkpoint-12").items():
        torch.testing.assert_close(expected[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert not [path for out in (two, again, fewer) for path in out.iterdir() if path.name.startswith(".")]


def refuse(folder: str) -> None:
    """Exit codes of two processes that train in a locked folder: one reports the error, the other is silent."""

    def work(processes: Processes) -> None:
        with pytest.raises(LongspanError) as error:
            train(checked_recipe(2), Path(folder), make_text(300), pytest.MonkeyPatch(), processes=processes)
        assert error.type is (ConfigError if processes.is_first else OtherProcessError)
        assert "another process is training" in str(error.value)

    with locked(Path(folder)):
        assert on_processes(2, work) == [0, 0]


def use_different_files(folder: str) -> None:
    """Each check fails on the second process, and the first one ends without a sentence of its own."""

    def work(processes: Processes) -> None:
        rank = processes.rank
        recipe = make_recipe(training_lr=0.01 * (1 + rank))
        moved = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, corpus=f"/node{rank}/text"))
        nodes.check_recipe_is_equal(dataclasses.replace(moved, training=make_recipe().training), processes)
        (own := Path(folder, f"node{rank}")).mkdir()
        nodes.check_folder_is_shared(Path(folder), processes)
        checks = [
            (ConfigError, "training.lr=0.02", lambda: nodes.check_recipe_is_equal(moved, processes)),
            (ConfigError, str(own), lambda: nodes.check_folder_is_shared(own, processes, 0.2)),
            (DataError, "process 1", lambda: nodes.check_text_is_equal("the text", f"{rank}" * 64, processes)),
            (CheckpointError, "after step 1", lambda: nodes.check_step_is_equal(rank, own, processes)),
        ]
        for kind, value, check in checks:
            with pytest.raises(LongspanError) as error:
                check()
            assert error.type is (OtherProcessError if processes.is_first else kind)
            assert processes.is_first or value in str(error.value)

    assert on_processes(2, work) == [0, 0]
    assert not any(path.is_file() for path in Path(folder).rglob("*"))


def fill_the_disk(folder: str) -> None:
    """The disk is full when the first process commits a checkpoint: one error in both processes, nothing left over."""

    def full(path: Path) -> store.Entry:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def work(processes: Processes) -> None:
        patch = pytest.MonkeyPatch()
        train(checked_recipe(4), Path(folder, "run"), make_text(300), patch, processes=processes)
        patch.setattr(store, "_synced_entry", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            train(checked_recipe(8), Path(folder, "run"), make_text(300), patch, processes=processes, resume="auto")

    assert on_processes(2, work) == [0, 0]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    assert run_in_process(fill_the_disk, str(tmp_path)) == 0
    assert [path.name for path in (tmp_path / "run").iterdir() if "checkpoint" in path.name] == ["checkpoint-4"]


def refuse_both(folder: str) -> None:
    for check in (refuse, use_different_files):
        (place := Path(folder, check.__name__)).mkdir()
        check(str(place))


def test_a_second_launch_and_nodes_with_different_files_are_refused(tmp_path: Path) -> None:
    assert run_in_process(refuse_both, str(tmp_path)) == 0


def test_a_batch_that_cannot_be_divided_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"training.batch=6 .* 4 processes"):
        Processes(0, 4).check_batch(6, 1)
    ALONE.check_batch(6, 2)


def test_graph_capture_is_refused_with_torchrun() -> None:
    def work(processes: Processes) -> None:
        recipe = make_recipe(training_cuda_graph=True, data_documents=False)
        with pytest.raises(ConfigError, match=r"training\.cuda_graph=true.*torchrun.*cuda_graph=false"):
            run.make_trainer(recipe, make_text(300), torch.device("cpu"), (), processes)

    assert on_processes(1, work) == [0]
