"""What a run will cost, from a few measured steps."""

import dataclasses
import resource
import time
from dataclasses import dataclass
from typing import Any

import torch

from longspan.data import Encoded
from longspan.training.recipe import Recipe, as_steps
from longspan.training.rehearsal import rehearse
from longspan.training.run import make_trainer
from longspan.training.schedules import value_at

MEASURED = 5


@dataclass(frozen=True)
class Estimate:
    """`tokens_per_step` are the fewest and the most of a schedule; a pass is counted with what the run begins with."""

    parameters: int
    tokens_per_step: tuple[int, int]
    tokens_per_pass: int
    steps_per_pass: int
    memory_bytes: int
    tokens_per_second: float
    seconds: float


def dry_run(recipe: Recipe, text: Encoded, device: torch.device) -> Estimate:
    """Takes a few steps of the largest kind the recipe has, and writes nothing. The first ones, which allocate and on a
    GPU fill the memory, compile and record, are not timed."""
    rehearse(make_trainer(recipe, text, device)[1])
    _, trainer = make_trainer(largest(recipe), text, device)
    filling = -(-trainer.model.tokens_to_fill // trainer.recipe.model.segment) + 2 if device.type == "cuda" else 0
    for _ in range(1 + filling):
        trainer.take_step()
    _wait(device)
    tokens, began = trainer.tokens, time.perf_counter()
    for _ in range(MEASURED):
        trainer.take_step()
    trainer.ledger.drain()
    _wait(device)
    speed = (trainer.tokens - tokens) / (time.perf_counter() - began)
    sizes = [size for _, size in step_sizes(recipe)]
    return Estimate(
        parameters=trainer.model.parameter_count,
        tokens_per_step=(min(sizes), max(sizes)),
        tokens_per_pass=len(text),
        steps_per_pass=-(-(len(text) - 1) // sizes[0]),
        memory_bytes=_memory(device),
        tokens_per_second=speed,
        seconds=_seconds(recipe, speed),
    )


def largest(recipe: Recipe) -> Recipe:
    """The recipe with the most its schedules come to from the first step on."""
    scheduled = {key: getattr(recipe.training, key) for key in ("batch", "segment", "memory")}
    most: dict[str, Any] = {
        key: max(v for _, v in as_steps(value)) for key, value in scheduled.items() if value is not None
    }
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **most))


def step_sizes(recipe: Recipe) -> list[tuple[int, int]]:
    """From which step on a step has how many tokens."""
    training = recipe.training
    batch, segment = as_steps(training.batch), as_steps(training.segment or recipe.model.segment)
    begins = sorted({step for step, _ in (*batch, *segment)})
    return [(step, value_at(batch, step) * value_at(segment, step)) for step in begins]


def _seconds(recipe: Recipe, speed: float) -> float:
    """Until the first limit is met, validation and saving aside."""
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


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
