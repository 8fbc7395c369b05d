"""Checkpoints with a valid manifest and invalid contents: a resume works, or fails with a one-line error."""

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from longspan.checkpoints import store
from longspan.errors import CheckpointError, LongspanError
from longspan.shapes import Tensor
from longspan.training import run, snapshot
from longspan.training.loop import Trainer
from longspan.training.observers.average_trigger import AverageTrigger
from longspan.training.observers.checkpoints import Checkpoints
from longspan.training.observers.early_stop import EarlyStop
from tests.checkpoints.test_mutated_checkpoints import with_manifest
from tests.training.conftest import make_recipe, make_text

TEXT = make_text(300)
RECIPE = make_recipe(training_averaging="ema", training_accumulate=2, training_patience=3, training_validate_every=1)
ODD: list[Any] = [None, -1, 10**6, 2**40, 10**30, 1.5, float("nan"), float("inf"), True, "x", [], [1], {"a": 1}, [[[]]]]
SOME = None if os.environ.get("LONGSPAN_TORTURE") else 80
Path_ = tuple[str | int, ...]
Files = dict[str, bytes]


def new_trainer(out: Path) -> Trainer:
    observers = [EarlyStop(3), AverageTrigger(2, 1), Checkpoints(out, 1, 3)]
    return run.make_trainer(RECIPE, TEXT, torch.device("cpu"), observers)[1]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The files of a checkpoint after three steps, with facts of every observer."""
    trainer = new_trainer(tmp_path)
    for _ in range(3):
        trainer.take_step()
    trainer.observers[0].best, trainer.observers[1].scores = 1.5, [2.0, 1.5]  # type: ignore[attr-defined]
    snapshot.save(trainer, tmp_path / "checkpoint-3")
    return {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-3").iterdir()}


def resumed(trainer: Trainer, out: Path, files: Files) -> Trainer:
    """The trainer after one step from a checkpoint with these files."""
    for name, content in with_manifest(files).items():
        (out / "checkpoint-3" / name).write_bytes(content)
    snapshot.load(trainer, store.read_folder(out / "checkpoint-3", snapshot.PARTS))
    if not trainer.finished:
        trainer.take_step()
    return trainer


def places(values: Any, path: Path_ = ()) -> Iterator[Path_]:
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        yield (*path, key)
        yield from places(value, (*path, key))


def forged_facts(facts: dict[str, Any]) -> Iterator[bytes]:
    for *path, last in places(facts):
        for odd in (*ODD, KeyError):
            changed = copy.deepcopy(facts)
            table: Any = changed
            for key in path:
                table = table[key]
            if odd is KeyError:
                del table[last]
            else:
                table[last] = odd
            yield json.dumps(changed).encode()


def forged_tensors(tensors: dict[str, Tensor]) -> Iterator[bytes]:
    kinds = {(name.partition("/")[0], name.partition(":")[2]): name for name in tensors}
    for name in kinds.values():
        t = tensors[name]
        odd = [t[..., None], t.flatten()[:0], torch.zeros(()), torch.cat([t[None], t[None]]), t + 10**6, t * 0 - 1]
        odd += [t.to(kind) for kind in (torch.int32, torch.uint16, torch.bool, torch.complex64, torch.float8_e5m2)]
        odd += [t.double(), t * torch.nan, t + torch.inf] if t.is_floating_point() else []
        for other in odd:
            yield save(tensors | {name: other.contiguous().clone()})
        yield save({key: value for key, value in tensors.items() if key != name})
        yield save(tensors | {f"{name}_": t.clone()})


def test_forged_snapshots(tmp_path: Path, files: Files) -> None:
    tensors = load(files[snapshot.TENSORS])
    forgeries = [{snapshot.FACTS: content} for content in forged_facts(json.loads(files[snapshot.FACTS]))]
    forgeries += [{snapshot.TENSORS: content} for content in forged_tensors(tensors)]
    random.Random(0).shuffle(forgeries)
    refused: list[str] = []
    trainer = new_trainer(tmp_path)
    for change in forgeries[:SOME]:
        try:
            resumed(trainer, tmp_path, files | change)
        except LongspanError as error:
            refused.append(str(error))
    assert len(refused) > len(forgeries[:SOME]) // 2
    assert not any("\n" in message for message in refused)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("memory.0/length", lambda t: t + 10**6, "1000012"),
        ("memory.0/length", lambda t: t - 100, "positions"),
        ("memory.1/1.hidden", lambda t: t[:, :-1], "positions"),
        ("memory.1/1.hidden", lambda t: torch.cat([t, t]), "1.hidden"),
        ("guard/count", lambda t: t * torch.nan, "guard/count"),
        ("guard/variance", lambda t: t - 1e9, "guard/variance"),
        ("optimizer/u:step", lambda t: t + 1, "optimizer/u:step"),
        ("random/cpu", lambda t: t[:-1], "random"),
    ],
)
def test_invalid_tensors_are_refused(tmp_path: Path, files: Files, name: str, change: Any, named: str) -> None:
    tensors = load(files[snapshot.TENSORS])
    forged = save(tensors | {name: change(tensors[name]).contiguous().clone()})
    with pytest.raises(CheckpointError, match=named):
        resumed(new_trainer(tmp_path), tmp_path, files | {snapshot.TENSORS: forged})


def test_a_valid_checkpoint_is_resumed(tmp_path: Path, files: Files) -> None:
    trainer = resumed(new_trainer(tmp_path), tmp_path, files)
    assert trainer.step == 4
    assert [observer.facts() for observer in trainer.observers[:2]] == [
        {"best": 1.5, "waited": 0},
        {"scores": [2, 1.5]},
    ]
