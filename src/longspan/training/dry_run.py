"""Dry run: the cost of a run, estimated from a few measured steps."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch

from longspan.data import Encoded
from longspan.training.environment import peak_memory
from longspan.training.preflight import preflight
from longspan.training.recipe import Recipe, as_steps, value_at
from longspan.training.run import make_trainer

MEASURED_STEPS = 5


@dataclass(frozen=True)
class Estimate:
    """`tokens_per_step` is the minimum and maximum of the schedules; `steps_per_pass` is for the first size."""

    parameters: int
    tokens_per_step: tuple[int, int]
    tokens_per_pass: int
    steps_per_pass: int
    memory_bytes: int
    tokens_per_second: float
    seconds: float


def dry_run(recipe: Recipe, text: Encoded, device: torch.device) -> Estimate:
    """Run a few steps of the largest size in the recipe and write nothing. The first steps are not timed: they
    allocate, and on a GPU they fill the memory, compile and capture."""
    preflight(make_trainer(recipe, text, device)[1])
    _, trainer = make_trainer(largest(recipe), text, device)
    filling = -(-trainer.reading.memory // trainer.reading.segment) + 2 if device.type == "cuda" else 0
    for _ in range(1 + filling):
        trainer.take_step()
    _synchronize(device)
    tokens, start = trainer.tokens, time.perf_counter()
    for _ in range(MEASURED_STEPS):
        trainer.take_step()
    trainer.ledger.drain()
    _synchronize(device)
    speed = (trainer.tokens - tokens) / (time.perf_counter() - start)
    sizes = [size for _, size in step_sizes(recipe)]
    return Estimate(
        parameters=trainer.model.parameter_count,
        tokens_per_step=(min(sizes), max(sizes)),
        tokens_per_pass=len(text),
        steps_per_pass=-(-(len(text) - 1) // sizes[0]),
        memory_bytes=peak_memory(device),
        tokens_per_second=speed,
        seconds=seconds_of(recipe, speed),
    )


def largest(recipe: Recipe) -> Recipe:
    """The recipe with the largest batch, segment and memory of its schedules from the first step on."""
    scheduled = {key: getattr(recipe.training, key) for key in ("batch", "segment", "memory")}
    most: dict[str, Any] = {
        key: max(v for _, v in as_steps(value)) for key, value in scheduled.items() if value is not None
    }
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **most))


def step_sizes(recipe: Recipe) -> list[tuple[int, int]]:
    """(first step, tokens per step) for every part of the schedules."""
    batch, segment = as_steps(recipe.training.batch), as_steps(recipe.training.segment or 1)
    changes = sorted({step for step, _ in (*batch, *segment)})
    return [(step, value_at(batch, step) * recipe.training_reading(step).segment) for step in changes]


def seconds_of(recipe: Recipe, speed: float) -> float:
    """Time until the first limit at so many tokens per second, without validation and saving."""
    limits = recipe.training
    times = [limits.seconds, limits.tokens and limits.tokens / speed]
    if limits.steps is not None:
        sizes = step_sizes(recipe)
        ends = [*(step for step, _ in sizes[1:]), limits.steps]
        tokens = sum(
            max(0, min(end, limits.steps) - begin) * size for (begin, size), end in zip(sizes, ends, strict=True)
        )
        times.append(tokens / speed)
    return min(t for t in times if t is not None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
