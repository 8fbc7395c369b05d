"""A step: what the processor hands to the device, and all that the device does with it."""

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
from longspan.memory.copied import without_copies
from longspan.shapes import Bool, Float, Int, Tensor
from longspan.training.guard import Guard
from longspan.training.optimizers import Optimizer
from longspan.training.recipe import TrainingConfig


class Order(NamedTuple):
    """What the processor hands to the device for a step; `progress` and `factor`, of the learning rate, are tensors
    where a step is compiled or recorded, since that is done anew for every float."""

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    starts: Bool[Tensor, "B T"] | None
    progress: float | Float[Tensor, ""]
    factor: float | Float[Tensor, ""]

    def split(self, parts: int) -> list["Order"]:
        """Some rows each."""
        rows = self.tokens.shape[0] // parts
        starts = [None] * parts if self.starts is None else self.starts.split(rows)
        both = zip(self.tokens.split(rows), self.targets.split(rows), starts, strict=True)
        return [Order(*some, self.progress, self.factor) for some in both]


class Step:
    """Loss, gradients, clipping, the guard's judgement and the update: nothing in it asks the device for an answer."""

    def __init__(self, model: LanguageModel, config: TrainingConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.precision = choose_precision(config.precision, device)
        self.model = model.to(device, torch.float64 if self.precision == torch.float64 else None)
        self.optimizer = Optimizer(model, config)
        self.guard = Guard(config.spike, device)

    def __call__(
        self, objective: Callable[..., Any], states: list[State], *given: Any
    ) -> tuple[Float[Tensor, "4"], list[State]]:
        """All that the device does in a step; figures as the ledger wants them, and the memories after it."""
        order = Order(*given)
        loss, states = self.accumulate(objective, states, order)
        norm = self._clip()
        skip = self.guard.judge(loss, norm)
        self.optimizer.step(order.factor, skip)
        self.optimizer.zero_grad()
        return torch.stack([loss, norm, skip, self.guard.broken.to(loss.dtype)]), states

    def accumulate(
        self, objective: Callable[..., Any], states: list[State], order: Order
    ) -> tuple[Float[Tensor, ""], list[State]]:
        """Gradients of the mean loss over a batch, some rows at a time."""
        total, after = torch.zeros((), device=self.device), []
        for part, state in zip(order.split(len(states)), states, strict=True):
            with self.autocast():
                loss, left = objective(part.tokens, part.targets, state, part.progress, part.starts)
            after.append(left)
            (loss / len(states)).backward()
            total = total + loss.detach().float() / len(states)
        return total, after

    def _clip(self) -> Float[Tensor, ""]:
        """The norm of the whole gradient, which is then at most `clip` long."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.config.clip or math.inf
        return nn.utils.clip_grad_norm_(parameters, limit, foreach=True).float()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == torch.bfloat16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()


def since_start(unbroken: NDArray[np.int64], starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens of every row since a document began in it, once a segment with these beginnings has been read."""
    tail = starts[:, ::-1].argmax(1) + 1
    return np.where(starts.any(1), tail, unbroken + starts.shape[1])


def known_whole(state: State, unbroken: NDArray[np.int64]) -> State:
    """The state, which says whether so many tokens fill all that it holds; what may be copied is masked anyway."""
    held = max(tensor.shape[-2] for part in without_copies(state).parts.values() for tensor in part)
    return replace(state, whole=bool((unbroken >= held).all()))


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """float32, or bfloat16 products with float32 weights where the device has them."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cpu":
        raise DeviceError(
            "training.precision='bfloat16' is hundreds of times slower on a CPU than float32; leave it at 'auto'"
        )
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]
