"""A training step: its inputs, and the work of the device."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from longspan.contract import LanguageModel, State
from longspan.errors import DeviceError
from longspan.shapes import Bool, Float, Int, Tensor
from longspan.training.guard import Guard
from longspan.training.optimizers import Optimizer
from longspan.training.parallel import shard
from longspan.training.processes import ALONE, Processes
from longspan.training.recipe import TrainingConfig


class StepInputs(NamedTuple):
    """The inputs of a step; S is T without an overlap. `factor` multiplies the learning rate. In a compiled or captured
    step `progress` and `factor` are tensors, because a float would be a constant of the graph."""

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B S"]
    starts: Bool[Tensor, "B T"] | None
    progress: float | Float[Tensor, ""]
    factor: float | Float[Tensor, ""]

    def split(self, parts: int) -> list["StepInputs"]:
        """Equal parts of the rows."""
        rows = self.tokens.shape[0] // parts
        starts = [None] * parts if self.starts is None else self.starts.split(rows)
        both = zip(self.tokens.split(rows), self.targets.split(rows), starts, strict=True)
        return [StepInputs(*some, self.progress, self.factor) for some in both]


class Step:
    """Loss, gradients, clipping, the guard and the update, without a host sync."""

    def __init__(
        self, model: LanguageModel, config: TrainingConfig, device: torch.device, processes: Processes = ALONE
    ) -> None:
        self.config, self.device, self.processes = config, device, processes
        self.around_part: Callable[[bool], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.precision = choose_precision(config.precision, device)
        self.model = model.to(device, torch.float64 if self.precision == torch.float64 else None)
        self.sharded = processes.distributed and config.parallel == "fsdp"
        if self.sharded:
            shard(model, processes, self.precision)
        self.optimizer = Optimizer(model, config, processes)
        self.guard = Guard(config.spike, device)

    def __call__(
        self, objective: Callable[..., Any], states: list[State], *inputs: Any
    ) -> tuple[Float[Tensor, "4"], list[State]]:
        """One step. Returns its metrics (loss, norm, skipped, broken) and the states after it."""
        given = StepInputs(*inputs)
        with self.outside_autocast():
            loss, states = self.accumulate(objective, states, given)
            norm = self._clip()
            skip = self.guard.check(loss, norm)
            self.optimizer.step(given.factor, skip)
            self.optimizer.zero_grad()
        # A caller's autocast would keep casts of the weights before the update.
        torch.clear_autocast_cache()
        return torch.stack([loss, *(each.to(loss.dtype) for each in (norm, skip, self.guard.broken))]), states

    def accumulate(
        self, objective: Callable[..., Any], states: list[State], inputs: StepInputs
    ) -> tuple[Float[Tensor, ""], list[State]]:
        """Gradients of the mean loss over a batch, part by part. The loss is that of all processes."""
        wide = torch.float64 if self.precision == torch.float64 else torch.float32
        total, after = torch.zeros((), dtype=wide, device=self.device), list[State]()
        for part, state in zip(inputs.split(len(states)), states, strict=True):
            with self.around_part(len(after) == len(states) - 1):
                with self.autocast():
                    loss, next_state = objective(part.tokens, part.targets, state, part.progress, part.starts)
                (loss / len(states)).backward()
            after.append(next_state)
            total = total + loss.detach().to(wide) / len(states)
        return self.processes.mean(total), after

    def _clip(self) -> Float[Tensor, ""]:
        """Clip the gradient to norm `clip` and return its norm before."""
        parameters = [p for p in self.optimizer.parameters() if p.grad is not None]
        limit = self.config.clip or math.inf
        if not self.sharded:
            return nn.utils.clip_grad_norm_(parameters, limit, foreach=True).float()
        own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        norm = (self.processes.mean(own.square()) * self.processes.size).sqrt()
        nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)
        return norm.float()

    def outside_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Turns a caller's autocast off. Without one there is no context, so that casts are freed after each part."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the run, whatever autocast the caller uses."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.products is not None)

    @property
    def products(self) -> torch.dtype | None:
        """The dtype of matrix products, if it is not that of the weights."""
        return torch.bfloat16 if self.precision == torch.bfloat16 else None


def count_since_start(since_start: NDArray[np.int64], starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens of every row since its last document start, after a segment with these starts."""
    tail = starts[:, ::-1].argmax(1) + 1
    return np.where(starts.any(1), tail, since_start + starts.shape[1])


def with_full(state: State, since_start: NDArray[np.int64]) -> State:
    """The state with `full` set: true if the tokens since the last document start fill the caches of every row."""
    positions = max(getattr(cache, "positions", 0) for cache in state.caches)
    return replace(state, full=bool((since_start >= positions).all()))


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Default: bfloat16 autocast with float32 weights on CUDA, float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cpu":
        raise DeviceError("training.precision='bfloat16' is hundreds of times slower than float32 on a CPU; use 'auto'")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]
