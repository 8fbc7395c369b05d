"""What a run would meet only later (a schedule's next value, its first validation), tried before it writes anything."""

import dataclasses
import math
import os
from dataclasses import fields

import torch

from longspan.errors import ConfigError, DataError
from longspan.training.loop import Trainer
from longspan.training.recipe import as_steps
from longspan.training.schedules import value_at


def rehearse(trainer: Trainer) -> None:
    """Refuses what cannot be gone through with; changes nothing, random numbers included."""
    _check_batches(trainer)
    _check_keys(trainer)
    _check_copying(trainer)
    _check_memories(trainer)
    _check_segments(trainer)
    if trainer.device.type == "cpu":
        _check_step(trainer)
    for observer in trainer.observers:
        observer.rehearse(trainer)


def _check_batches(trainer: Trainer) -> None:
    text = trainer.lanes
    for _, rows in as_steps(trainer.config.batch):
        if len(text.ids) - 1 < rows:
            raise DataError(
                f"{text.name} has {len(text.ids):,} tokens, too few for a batch of {rows} rows; "
                "give it more text, or a smaller batch"
            )


def _check_keys(trainer: Trainer) -> None:
    """Settings of a memory are for families that have one."""
    recipe = trainer.recipe
    known = {field.name for field in fields(recipe.model)}
    asked = {"training.memory": recipe.training.memory}
    asked |= {f"evaluation.{key}": value for key, value in recipe.evaluation.settings.items()}
    for key, value in asked.items():
        if value is not None and key.partition(".")[2] not in known:
            raise ConfigError(f"{key} is not for a {recipe.family}, which has no such setting; leave it out")


def _check_copying(trainer: Trainer) -> None:
    """Weights to copy with are trained only by a model that copies."""
    model = trainer.recipe.model
    if getattr(model, "copy_width", 0) and not model.copy:
        raise ConfigError(
            f"model.copy_width={model.copy_width} gives weights to copy with, which model.copy=0 never trains; "
            "give how many positions to copy from, or leave both out"
        )


def _check_memories(trainer: Trainer) -> None:
    """Every memory of the schedule makes a config, and its states fit into this machine."""
    model, held = trainer.model, trainer.model.config
    rows = max(rows for _, rows in as_steps(trainer.config.batch))
    room = _room(trainer.device)
    copied = ", model.copy" if getattr(held, "copy", 0) else ""
    scheduled = trainer.config.memory
    memories = [None] if scheduled is None else [memory for _, memory in as_steps(scheduled)]
    try:
        for memory in memories:
            if memory is not None:
                model.config = dataclasses.replace(trainer.recipe.model, memory=memory)
            size = 2 * model.state_size * rows
            if size > room:
                raise ConfigError(
                    f"{rows} rows of memory need at least {size / 2**30:,.0f} GiB and this machine has "
                    f"{room / 2**30:,.0f}; lower model.memory{copied} or training.batch"
                )
    finally:
        model.config = held


def _check_segments(trainer: Trainer) -> None:
    """A family may know segments up to some length only."""
    usual = trainer.recipe.model.segment
    jitter = trainer.config.segment_jitter
    longest = max(segment for _, segment in as_steps(trainer.config.segment or usual))
    longest = longest + math.ceil(5 * jitter)  # a normal draw lies beyond once in three million
    longest = min(longest, len(trainer.lanes.ids) - 1)  # more is never read at once
    if longest > usual:
        try:
            with trainer.as_model() as model, torch.no_grad():
                model.hidden_states(torch.zeros(1, longest, dtype=torch.int64, device=trainer.device))
        except ConfigError as error:
            if not jitter:
                raise
            raise ConfigError(f"training.segment_jitter={jitter} draws segments of up to {longest}: {error}") from None


def _check_step(trainer: Trainer) -> None:
    """What the largest batch keeps for its gradients fits into this machine, as told by one row and by two: the kernel
    ends a process that asks for more without a word."""
    begins, batch = max(as_steps(trainer.config.batch), key=lambda step: step[1])
    segment = value_at(trainer.config.segment or trainer.recipe.model.segment, begins)
    segment = min(segment, (len(trainer.lanes.ids) - 1) // batch)  # a row has no more
    one, two = (_kept(trainer, rows, segment) for rows in (1, 2))
    rows = batch // trainer.config.accumulate
    size, room = one + (rows - 1) * (two - one), _room(trainer.device)
    if size > room:
        raise ConfigError(
            f"a step keeps {size / 2**30:,.1f} GiB for its gradients and this machine has {room / 2**30:,.1f}; "
            "lower training.batch, raise training.accumulate, or set training.checkpoint_activations=true"
        )


def _kept(trainer: Trainer, rows: int, segment: int) -> int:
    """Bytes that are held until the backward pass once some rows have been read."""
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(rows, segment, dtype=torch.int64)
    with trainer.quiet_random(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.objective(tokens, tokens, trainer.empty_state(rows), 0.0, None)
    return sum(held.values())


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
