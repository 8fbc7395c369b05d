"""A run at one step as files: a model folder anyone can load, with what only a resume needs beside it."""

import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longspan.checkpoints import store
from longspan.checkpoints.manifest import Verified, read_json
from longspan.checkpoints.model_folder import WEIGHTS, save_model
from longspan.checkpoints.weights import fill, parse_weights, require_match, weights_of
from longspan.contract import State
from longspan.errors import CheckpointError
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
    """Put a fresh trainer of the same recipe where the checkpoint was taken."""
    path = verified.path
    facts = read_json(verified.contents[FACTS], str(path / FACTS))
    if facts.get("format") != FORMAT:
        raise CheckpointError(f"{path} has training format {facts.get('format')!r:.40}; this longspan reads {FORMAT}")
    tensors = parse_weights(verified.contents[TENSORS], str(path / TENSORS))
    model = parse_weights(verified.contents[WEIGHTS], str(path / WEIGHTS))
    where = str(path / TENSORS)
    try:
        trainer.lanes.load_state_dict(facts["data"])
        trainer.step, trainer.tokens = int(facts["step"]), int(facts["tokens"])
        trainer.seconds_before, trainer.stopped_early = float(facts["seconds"]), bool(facts["stopped_early"])
        count, noted = int(facts["memories"]), dict(facts["observers"])
        # More patience, or none asked for, takes up a run that had stopped early.
        waited = int(dict(noted.get("EarlyStop", {})).get("waited", 0))
        trainer.stopped_early = trainer.stopped_early and 0 < trainer.config.patience <= waited
        if trainer.average is not None and trainer.config.average_patience:
            began = facts["averaging_began"]
            trainer.average.began = None if began is None else int(began)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / FACTS} lacks or garbles {error}; the file is damaged") from None
    if trainer.average is not None:
        require_match(weights_of(trainer.model), model, str(path / WEIGHTS))
        # Buffers have no mean; they are filled with the weights.
        trainer.average.load({name: model[name] for name in trainer.average.means}, str(path / WEIGHTS))
        model = _group(tensors, "weights")
    fill(trainer.model, model, str(path / WEIGHTS))
    trainer.optimizer.load(_group(tensors, "optimizer"), where)
    trainer.guard.load(_group(tensors, "guard"), where)
    states = [State.from_tensors(_group(tensors, f"memory.{k}")) for k in range(count)]
    if trainer.fills:
        # By the loop's own rule, so that the next step takes the way it would have taken.
        states = [known_whole(state, state.length.numpy()) for state in states]
    trainer.states = [state.to(trainer.device) for state in states]
    trainer.unbroken = torch.cat([state.length for state in states]).numpy() if states else trainer.unbroken
    for observer in trainer.observers:
        observer.restore(noted.get(type(observer).__name__, {}))
    trainer.start_clock()
    _set_random(trainer, tensors, where)


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
