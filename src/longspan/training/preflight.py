"""Preflight: check before a run starts what it would reach only later, such as schedules and the first validation."""

import math
import os
from dataclasses import replace

import torch

from longspan.errors import ConfigError, counted
from longspan.models.families import outline, state_bytes
from longspan.training.loop import Trainer
from longspan.training.recipe import as_steps


def preflight(trainer: Trainer) -> None:
    """Raise an error if the run cannot be completed. Changes nothing, not even the random state."""
    _check_batches(trainer)
    _check_pointer(trainer)
    _check_readings(trainer)
    _check_overlap(trainer)
    _check_segments(trainer)
    if trainer.device.type == "cpu":
        _check_step(trainer)
    for observer in trainer.observers:
        observer.preflight(trainer)


def _check_batches(trainer: Trainer) -> None:
    for _, rows in as_steps(trainer.config.batch):
        trainer.streams.check_batch(rows)


def _check_pointer(trainer: Trainer) -> None:
    """Weights of a pointer that is never used are never trained."""
    width = getattr(trainer.recipe.model, "pointer_width", 0)
    if width and not trainer.reading.pointer:
        raise ConfigError(
            f"model.pointer_width={width} adds weights that training.pointer=0 never trains; "
            "set training.pointer to the number of positions it may copy from, or leave out both"
        )


def _check_readings(trainer: Trainer) -> None:
    """The model accepts every setting of the schedules, and the states fit into memory."""
    recipe, available = trainer.recipe, _available_memory(trainer.device)
    rows = max(rows for _, rows in as_steps(trainer.config.batch)) // trainer.processes.size
    model = outline(recipe.family, recipe.model)
    trainer.model.check_reading(recipe.evaluation_reading())
    for reading in recipe.training_readings():
        trainer.model.check_reading(reading)
        size = rows * state_bytes(model, reading)
        if size > available:
            raise ConfigError(
                f"the memory of {counted(rows, 'row')} needs {size / 2**30:,.0f} GiB, but this machine has "
                f"{available / 2**30:,.0f}; lower training.memory, training.pointer or training.batch"
            )


def _check_overlap(trainer: Trainer) -> None:
    """Tokens that are read again must not be in a state too, and must not be predicted again."""
    given, model = f"training.overlap={trainer.config.overlap}", trainer.model
    if not trainer.config.overlap:
        return
    if model.draws_targets or not model.predicts_next:
        raise ConfigError(
            f"{given} would make {trainer.recipe.family} predict the tokens that are read again, because it chooses "
            "what it predicts; leave it out"
        )
    for reading in trainer.recipe.training_readings():
        if model.has_memory(reading) or reading.pointer:
            keys = [key for key in ("memory", "pointer") if key in model.settings and getattr(reading, key)]
            fix = " and ".join(f"training.{key}=0" for key in keys)
            raise ConfigError(
                f"{given} reads tokens again that are already in the state of the model; "
                f"{f'set {fix}, or leave it out' if fix else 'leave it out'}"
            )


def _check_segments(trainer: Trainer) -> None:
    """The model accepts the longest segment that jitter may draw, with its overlap."""
    jitter, overlap = trainer.config.segment_jitter, trainer.config.overlap
    if not jitter and not overlap:
        return
    longest = max(reading.segment for reading in trainer.recipe.training_readings())
    longest += overlap + math.ceil(5 * jitter)  # a normal sample exceeds 5 sigmas once in three million
    longest = trainer.streams.longest_segment(longest, 1)
    keys = [f"training.{key}={value}" for key, value in (("segment_jitter", jitter), ("overlap", overlap)) if value]
    try:
        trainer.model.check_reading(replace(trainer.reading, segment=max(longest, 1)))
    except ConfigError as error:
        need = f"{' and '.join(keys)} need{'s' * (len(keys) == 1)} segments of up to {longest} tokens"
        raise ConfigError(f"{need}: {error}") from None


def _check_step(trainer: Trainer) -> None:
    """The activations of the largest batch fit into memory, extrapolated from one and two rows. Without this check the
    kernel would kill the process without a message."""
    start, batch = max(as_steps(trainer.config.batch), key=lambda step: step[1])
    segment = trainer.recipe.training_reading(start).segment + trainer.config.overlap
    segment = trainer.streams.longest_segment(segment, batch)
    one, two = (_activation_bytes(trainer, rows, segment) for rows in (1, 2))
    rows = batch // (trainer.config.accumulate * trainer.processes.size)
    size, available = one + (rows - 1) * (two - one), _available_memory(trainer.device)
    if size > available:
        raise ConfigError(
            f"the activations of a step need {size / 2**30:,.1f} GiB, but this machine has "
            f"{available / 2**30:,.1f}; lower training.batch, raise training.accumulate, or set "
            "training.checkpoint_activations=true"
        )


def _activation_bytes(trainer: Trainer, rows: int, segment: int) -> int:
    """Bytes saved for the backward pass of a step."""
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(rows, segment, dtype=torch.int64)
    buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}  # those of batch norm change
    with trainer.preserve_rng(), torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        trainer.own_objective(tokens, tokens, trainer.empty_state(rows), 0.0, None)
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(buffers[name])
    return sum(saved.values())


def _available_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
