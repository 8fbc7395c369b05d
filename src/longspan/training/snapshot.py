"""A run at one step as files: a model folder anyone can load, with what only a resume needs beside it."""

import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.manifest import Verified, read_json
from longspan.checkpoints.model_folder import WEIGHTS, save_model
from longspan.checkpoints.weights import fill, parse_weights, require_match, weights_of
from longspan.contract import FLOATS, State
from longspan.errors import CheckpointError, ConfigError, StateError
from longspan.shapes import Tensor
from longspan.training.loop import Trainer
from longspan.training.step import known_whole

FORMAT = 1
TENSORS, FACTS, RECIPE = "training.safetensors", "training.json", "recipe.toml"
PARTS = (WEIGHTS, TENSORS, FACTS)


def save(trainer: Trainer, path: Path) -> None:
    """A checkpoint, whole or not at all: the model as one would use it, and everything to go on from."""
    facts = (json.dumps(facts_of(trainer), indent=1) + "\n").encode()
    extra: dict[str, store.Content] = {FACTS: facts, TENSORS: partial(save_file, tensors_of(trainer))}
    extra[RECIPE] = trainer.recipe.to_toml().encode()
    with trainer.as_model() as model:
        save_model(path, model, trainer.tokenizer, notes=notes(trainer), extra=extra, replace=True)


def notes(trainer: Trainer) -> list[str]:
    """Where the model comes from, and how the recipe would have it scored."""
    recipe = trainer.recipe
    chosen = recipe.evaluation
    test = recipe.data.test
    flags = ["--data", shlex.quote(test or recipe.data.corpus), *([] if test else ["--split test"])]
    flags += [
        f"--{name} {value}"
        for name in ("segment", "memory", "clamp", "copy")
        if (value := getattr(chosen, name)) is not None
    ]
    flags += ["--same-length"] if chosen.same_length else []
    text = f"{trainer.tokens:,} tokens of {trainer.lanes.name} (fingerprint {trainer.lanes.fingerprint[:16]})"
    return [
        f"Recipe {recipe.name}, seed {recipe.training.seed}, {trainer.step:,} steps, {text}.",
        f"To be scored by: longspan eval MODEL {' '.join(flags)}",
    ]


def facts_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": trainer.step,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "stopped_early": trainer.stopped_early,
        "data": trainer.lanes.state_dict(),
        "memories": len(trainer.states),
        "averaging_began": None if trainer.average is None else trainer.average.began,
        "observers": {type(observer).__name__: facts for observer in trainer.observers if (facts := observer.facts())},
    }


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies on the CPU, none sharing memory with another: safetensors refuses that."""
    named = _grouped("optimizer", trainer.optimizer.tensors()) | _grouped("guard", trainer.guard.tensors())
    if trainer.average is not None:
        # The model file holds the average, so the weights themselves are kept here.
        named |= _grouped("weights", weights_of(trainer.model))
    for k, state in enumerate(trainer.states):
        named |= _grouped(f"memory.{k}", state.tensors())
    named["random/cpu"] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        named["random/cuda"] = torch.cuda.get_rng_state(trainer.device)
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}


def load(trainer: Trainer, verified: Verified) -> None:
    """Put a trainer of the same recipe where the checkpoint was taken; what could not have been saved is refused."""
    path = verified.path
    where = str(path / TENSORS)
    try:
        facts = _read_facts(read_json(verified.contents[FACTS], str(path / FACTS)), trainer)
        tensors = parse_weights(verified.contents[TENSORS], where)
        _require_sound(tensors, facts)
        trainer.lanes.load_state_dict(facts["data"])
        states = _read_states(trainer, tensors, facts["memories"])
    except (ConfigError, StateError) as error:
        raise CheckpointError(f"{path} cannot be resumed, since it is damaged: {error}") from None
    model = parse_weights(verified.contents[WEIGHTS], str(path / WEIGHTS))
    trainer.step, trainer.tokens, trainer.seconds_before = facts["step"], facts["tokens"], facts["seconds"]
    # More patience, or none asked for, takes up a run that had stopped early.
    waited = facts["observers"].get("EarlyStop", {}).get("waited", 0)
    trainer.stopped_early = facts["stopped_early"] and 0 < trainer.config.patience <= waited
    if trainer.average is not None:
        if trainer.config.average_patience:
            trainer.average.began = facts["averaging_began"]
        require_match(weights_of(trainer.model), model, str(path / WEIGHTS))
        # Buffers have no mean; they are filled with the weights.
        trainer.average.load({name: model[name] for name in trainer.average.means}, str(path / WEIGHTS))
        model = _group(tensors, "weights")
    fill(trainer.model, model, str(path / WEIGHTS))
    trainer.optimizer.load(_group(tensors, "optimizer"), where)
    trainer.guard.load(_group(tensors, "guard"), where)
    if trainer.fills:
        # By the loop's own rule, so that the next step takes the way it would have taken.
        states = [known_whole(state, state.length.numpy()) for state in states]
    trainer.states = [state.to(trainer.device) for state in states]
    trainer.unbroken = torch.cat([state.length for state in states]).numpy() if states else trainer.unbroken
    for observer in trainer.observers:
        observer.restore(facts["observers"].get(type(observer).__name__, {}))
    trainer.start_clock()
    _set_random(trainer, tensors, where)


def _read_facts(values: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """What training.json holds, every value of its type; what observers noted as they declare it in `kept`."""
    if values.get("format") != FORMAT or isinstance(values["format"], bool):
        raise ConfigError(f"it has training format {values.get('format')!r:.40}; this longspan reads {FORMAT}")
    kinds: dict[str, Any] = {"step": int, "tokens": int, "seconds": float, "stopped_early": bool, "memories": int}
    facts = _typed(values, kinds | {"averaging_began": int | None}, FACTS)
    if facts["step"] > facts["tokens"]:
        raise ConfigError(f"{FACTS} has {facts['step']} steps of {facts['tokens']} tokens in all")
    if facts["memories"] not in (0, parts := trainer.config.accumulate):
        raise ConfigError(f"{FACTS} has memories={facts['memories']} where training.accumulate={parts}")
    for name in ("data", "observers"):
        if not isinstance(values.get(name), dict):
            raise ConfigError(f"{FACTS} holds no table {name!r}")
    facts["data"], facts["observers"] = values["data"], {}
    for observer in trainer.observers:
        name = type(observer).__name__
        noted = values["observers"].get(name, {})
        if not isinstance(noted, dict):
            raise ConfigError(f"{FACTS} has observers.{name}={config.shown(noted)} and not a table")
        kept = {key: kind for key, kind in observer.kept.items() if key in noted}
        facts["observers"][name] = noted | _typed(noted, kept, f"observers.{name}")
    return facts


def _typed(values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of some keys, each of its type; numbers are counts, times and losses, so none is negative or huge."""
    if missing := sorted(set(kinds) - set(values)):
        raise ConfigError(f"{where} lacks {missing[0]!r}")
    made = {key: config.convert(kind, values[key], f"{where}.{key}") for key, kind in kinds.items()}
    for key, value in made.items():
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not 0 <= number < 2**63:
                raise ConfigError(f"{where}.{key}={config.shown(number)} is no count or measure")
    return made


def _read_states(trainer: Trainer, tensors: Mapping[str, Tensor], count: int) -> list[State]:
    """The memory of each part of a batch, checked against the model; in the types it was saved in, so that a resumed
    run computes what it would have computed."""
    states = [State.from_tensors(_group(tensors, f"memory.{k}")) for k in range(count)]
    for state in states:
        trainer.model.check(state)
        if state.batch * count != trainer.lanes.batch:
            raise StateError(f"{count} memories of {state.batch} rows do not make a batch of {trainer.lanes.batch}")
    return states


def _require_sound(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Names that are known; floats that are numbers; counts and means of squares that are not negative."""
    groups = {"optimizer", "guard", "weights", *(f"memory.{k}" for k in range(facts["memories"]))}
    for name, tensor in tensors.items():
        if name.partition("/")[0] not in groups and name not in ("random/cpu", "random/cuda"):
            raise StateError(f"{TENSORS} holds {name!r:.80}, which no checkpoint has")
        if tensor.is_floating_point() and tensor.dtype not in FLOATS:
            raise StateError(f"{TENSORS} holds {name!r:.80} as {tensor.dtype}, which no checkpoint has")
        if tensor.dtype not in FLOATS:
            continue
        counts = name.endswith((":step", "guard/count"))
        least = 0 if counts or name.startswith("guard/") or name.endswith(":exp_avg_sq") else -torch.inf
        most = facts["step"] if counts else torch.inf
        if not bool(((tensor >= least) & (tensor <= most)).all()):
            raise StateError(f"{TENSORS} holds {name!r:.80} with a NaN, or outside of {least} to {most}")


def _set_random(trainer: Trainer, tensors: Mapping[str, Tensor], where: str) -> None:
    try:
        torch.set_rng_state(tensors["random/cpu"])
        if trainer.device.type == "cuda" and "random/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random/cuda"], trainer.device)
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where} holds no random state that torch takes ({error!s:.80}); is it damaged?"
        ) from None


def _grouped(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for name, tensor in tensors.items()}


def _group(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{group}/"): t for name, t in tensors.items() if name.startswith(f"{group}/")}
