"""A checkpoint of a run: a model folder that anyone can load, plus the files that a resume needs."""

import json
import shlex
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.manifest import SHARD, Verified, read_json
from longspan.checkpoints.model_folder import WEIGHTS, description, save_model
from longspan.checkpoints.shards import read_tensors
from longspan.checkpoints.states import FLOATS, restore_state
from longspan.checkpoints.weights import fill, require_match, weights_of
from longspan.contract import State
from longspan.errors import CheckpointError, ConfigError, StateError
from longspan.shapes import Tensor
from longspan.training.loop import Trainer
from longspan.training.step import with_full

if TYPE_CHECKING:
    from longspan.training.sharded_save import PendingSave

FORMAT = 1
TENSORS, FACTS, RECIPE = "training.safetensors", "training.json", "recipe.toml"
PARTS = (WEIGHTS, TENSORS, FACTS)


def is_resumable(files: Collection[str]) -> bool:
    """Whether these files of a folder are enough to resume from: shards take the place of safetensors files."""
    return set(PARTS) <= set(files) or (FACTS in files and any(SHARD.fullmatch(name) for name in files))


def save(trainer: Trainer, path: Path) -> "PendingSave | None":
    """Write a checkpoint atomically: the model as it is used, and everything that a resume needs.

    Several processes write it together and in the background. Then this returns the pending save.
    """
    small = {
        FACTS: (json.dumps(facts_of(trainer), indent=1) + "\n").encode(),
        RECIPE: trainer.recipe.to_toml().encode(),
    }
    if trainer.processes.distributed:
        return _save_shards(trainer, path, small)
    extra: dict[str, store.Content] = {**small, TENSORS: partial(save_file, tensors_of(trainer))}
    with trainer.evaluation_model() as model:
        save_model(path, model, trainer.tokenizer, notes=notes(trainer), extra=extra, replace=True)
    return None


def _save_shards(trainer: Trainer, path: Path, small: Mapping[str, bytes]) -> "PendingSave":
    from longspan.training.sharded_save import save_shards

    tensors = _grouped(TENSORS, tensors_of(trainer))
    with trainer.evaluation_model() as model:
        tensors |= _grouped(WEIGHTS, {name: _copied(tensor) for name, tensor in weights_of(model).items()})
        files = description(model, trainer.tokenizer, notes=notes(trainer)) | dict(small)
    return save_shards(path, tensors, files, trainer.processes)


def notes(trainer: Trainer) -> list[str]:
    """Lines for the model's README: how it was trained, and how to score it."""
    recipe = trainer.recipe
    test = recipe.data.test
    flags = ["--data", shlex.quote(test or recipe.data.corpus), *([] if test else ["--split test"])]
    text = f"{trainer.tokens:,} tokens of {trainer.streams.name} (fingerprint {trainer.streams.fingerprint[:16]})"
    found = [f"Recipe {recipe.name}, seed {recipe.training.seed}, {trainer.step:,} steps, {text}."]
    if recipe.family != "task" and trainer.model.predicts_next:
        found.append(f"Score it with: longspan eval MODEL {' '.join(flags)}")
    return found


def facts_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": trainer.step,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "stopped_early": trainer.stopped_early,
        "data": trainer.streams.state_dict(),
        "memories": len(trainer.states),
        "averaging_began": None if trainer.average is None else trainer.average.start,
        "observers": {type(observer).__name__: facts for observer in trainer.observers if (facts := observer.facts())},
    }


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies on the CPU. None shares memory with another, because safetensors refuses that. With several processes,
    memory and sharded weights are DTensors."""
    named = _grouped("optimizer", trainer.optimizer.tensors()) | _grouped("guard", trainer.guard.tensors())
    if trainer.average is not None:
        # The model file has the average, so the weights are saved here.
        named |= _grouped("weights", weights_of(trainer.model))
    for k, state in enumerate(trainer.states):
        memory = {name: trainer.processes.as_rows(tensor) for name, tensor in state.tensors().items()}
        named |= _grouped(f"memory.{k}", memory)
    named["random/cpu"] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        named["random/cuda"] = torch.cuda.get_rng_state(trainer.device)
    return {name: _copied(tensor) for name, tensor in named.items()}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def load(trainer: Trainer, verified: Verified) -> None:
    """Restore a trainer of the same recipe from a checkpoint. Contents that `save` cannot have written are an error."""
    path = verified.path
    where = str(path / TENSORS)
    try:
        facts = _read_facts(read_json(verified.contents[FACTS], str(path / FACTS)), trainer)
        tensors = read_tensors(verified, TENSORS)
        _check_tensors(tensors, facts)
        trainer.streams.load_state_dict(facts["data"])
        states = _read_states(trainer, tensors, facts["memories"], facts["step"])
    except (ConfigError, StateError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be resumed: {error}") from None
    model = read_tensors(verified, WEIGHTS)
    trainer.step, trainer.tokens, trainer.seconds_before = facts["step"], facts["tokens"], facts["seconds"]
    # With more patience, or none, a run that stopped early continues.
    waited = facts["observers"].get("EarlyStop", {}).get("waited", 0)
    trainer.stopped_early = facts["stopped_early"] and 0 < trainer.config.patience <= waited
    if trainer.average is not None:
        if trainer.config.average_patience or isinstance(trainer.config.average_from, float):
            trainer.average.start = facts["averaging_began"]
        require_match(weights_of(trainer.model), model, str(path / WEIGHTS))
        # Buffers have no mean; `fill` restores them with the weights.
        trainer.average.load({name: model[name] for name in trainer.average.means}, str(path / WEIGHTS))
        model = _group(tensors, "weights")
    fill(trainer.model, model, str(path / WEIGHTS))
    trainer.optimizer.load(_group(tensors, "optimizer"), where)
    trainer.guard.load(_group(tensors, "guard"), where)
    if trainer.tracks_full:
        # By the rule of the loop, so that the next step has the same form (compiled or not) as without the resume.
        states = [with_full(state, state.length.numpy()) for state in states]
    trainer.states = [state.to(trainer.device) for state in states]
    trainer.since_start = torch.cat([state.length for state in states]).numpy() if states else trainer.since_start
    for observer in trainer.observers:
        observer.restore(facts["observers"].get(type(observer).__name__, {}))
    trainer.start_clock()
    _set_random(trainer, tensors, where)


def _read_facts(values: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """The contents of training.json with checked types. Those of observers are declared in `fact_types`."""
    if values.get("format") != FORMAT or isinstance(values["format"], bool):
        raise ConfigError(f"its training format is {values.get('format')!r:.40}; this version reads {FORMAT}")
    kinds: dict[str, Any] = {"step": int, "tokens": int, "seconds": float, "stopped_early": bool, "memories": int}
    facts = _typed(values, kinds | {"averaging_began": int | None}, FACTS)
    if facts["step"] > facts["tokens"]:
        raise ConfigError(f"{FACTS} has step={facts['step']} but only tokens={facts['tokens']}")
    if facts["memories"] not in (0, parts := trainer.config.accumulate):
        raise ConfigError(f"{FACTS} has memories={facts['memories']}, but training.accumulate={parts}")
    for name in ("data", "observers"):
        if not isinstance(values.get(name), dict):
            raise ConfigError(f"{FACTS} has no table {name!r}")
    facts["data"], facts["observers"] = values["data"], {}
    for observer in trainer.observers:
        name = type(observer).__name__
        stored = values["observers"].get(name, {})
        if not isinstance(stored, dict):
            raise ConfigError(f"{FACTS} has observers.{name}={config.shown(stored)}; it must be a table")
        types = {key: kind for key, kind in observer.fact_types.items() if key in stored}
        facts["observers"][name] = stored | _typed(stored, types, f"observers.{name}")
    return facts


def _typed(values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of some keys, with checked types. Numbers are counts, times and losses: not negative, below 2**63."""
    if missing := sorted(set(kinds) - set(values)):
        raise ConfigError(f"{where} has no {missing[0]!r}")
    converted = {key: config.convert(kind, values[key], f"{where}.{key}") for key, kind in kinds.items()}
    for key, value in converted.items():
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not 0 <= number < 2**63:
                raise ConfigError(f"{where}.{key}={config.shown(number)} must be between 0 and 2**63")
    return converted


def _read_states(trainer: Trainer, tensors: Mapping[str, Tensor], count: int, step: int) -> list[State]:
    """The state of each part of a batch, checked against the model. Dtypes stay as saved, so that the resumed run
    computes the same numbers."""
    reading = trainer.recipe.training_reading(max(step - 1, 0))
    named = [_group(tensors, f"memory.{k}") for k in range(count)]
    states = [restore_state(trainer.model, one, reading, convert=False) for one in named]
    for state in states:
        if state.batch * count != trainer.streams.batch:
            raise StateError(f"it has {count} memories of {state.batch} rows; the batch is {trainer.streams.batch}")
    return [state.rows(trainer.processes.part_of(state.batch)) for state in states]


def _check_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Names are known, floats are not NaN, counts and means of squares are not negative."""
    groups = {"optimizer", "guard", "weights", *(f"memory.{k}" for k in range(facts["memories"]))}
    for name, tensor in tensors.items():
        if name.partition("/")[0] not in groups and name not in ("random/cpu", "random/cuda"):
            raise StateError(f"{TENSORS} has an unknown tensor {name!r:.80}")
        if tensor.is_floating_point() and tensor.dtype not in FLOATS:
            raise StateError(f"{TENSORS} has {name!r:.80} with dtype {tensor.dtype}")
        if tensor.dtype not in FLOATS:
            continue
        counts = name.endswith((":step", "guard/count"))
        least = 0 if counts or name.startswith("guard/") or name.endswith(":exp_avg_sq") else -torch.inf
        most = facts["step"] if counts else torch.inf
        if not bool(((tensor >= least) & (tensor <= most)).all()):
            raise StateError(f"{TENSORS} has {name!r:.80} with values that are NaN or not between {least} and {most}")


def _set_random(trainer: Trainer, tensors: Mapping[str, Tensor], where: str) -> None:
    try:
        torch.set_rng_state(tensors["random/cpu"])
        if trainer.device.type == "cuda" and trainer.processes.distributed:
            trainer.processes.seed_device(trainer.config.seed, trainer.step)
        elif trainer.device.type == "cuda" and "random/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random/cuda"], trainer.device)
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where} has no valid random state ({error!s:.80}); resume from another checkpoint"
        ) from None


def _grouped(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for name, tensor in tensors.items()}


def _group(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{group}/"): t for name, t in tensors.items() if name.startswith(f"{group}/")}
