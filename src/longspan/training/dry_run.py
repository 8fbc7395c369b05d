"""What a run will cost, from a few measured steps."""

import resource
import time
from dataclasses import dataclass

import torch

from longspan.data import Encoded
from longspan.training.recipe import Recipe
from longspan.training.rehearsal import rehearse
from longspan.training.run import make_trainer

MEASURED = 5


@dataclass(frozen=True)
class Estimate:
    parameters: int
    tokens_per_step: int
    tokens_per_pass: int
    steps_per_pass: int
    steps: int | None
    memory_bytes: int
    tokens_per_second: float
    seconds: float


def dry_run(recipe: Recipe, text: Encoded, device: torch.device) -> Estimate:
    """Takes a few steps and writes nothing. The first one, which compiles and allocates, is not timed."""
    _, trainer = make_trainer(recipe, text, device)
    rehearse(trainer)
    trainer.take_step()
    _wait(device)
    tokens, began = trainer.tokens, time.perf_counter()
    for _ in range(MEASURED):
        trainer.take_step()
    trainer.ledger.drain()
    _wait(device)
    spent = time.perf_counter() - began
    speed = (trainer.tokens - tokens) / spent
    per_step = trainer.lanes.batch * trainer.recipe.model.segment
    rows = -(-trainer.lanes.row_length // trainer.recipe.model.segment)
    seconds = _seconds(recipe, spent / MEASURED, speed)
    return Estimate(
        parameters=trainer.model.parameter_count,
        tokens_per_step=per_step,
        tokens_per_pass=len(text),
        steps_per_pass=rows,
        steps=recipe.training.steps,
        memory_bytes=_memory(device),
        tokens_per_second=speed,
        seconds=seconds,
    )


def _seconds(recipe: Recipe, per_step: float, speed: float) -> float:
    """Until the first limit is met, validation and saving aside."""
    limits = recipe.training
    times = [limits.seconds, limits.steps and limits.steps * per_step, limits.tokens and limits.tokens / speed]
    return min(t for t in times if t is not None)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
