"""Weight averaging: the mean over many steps often scores better than the weights of the last one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from longspan.checkpoints.weights import copy_into
from longspan.shapes import Tensor
from longspan.training.recipe import TrainingConfig


class Average:
    """`ema`: an exponential mean; `asgd`: the plain mean since `start` (Polyak & Juditsky 1992).

    `start` is `average_from`: a step, or the step at which that share of the run is done. With `average_patience` it is
    the step at which validation stops improving. It is None until it is known. Before it the mean equals the weights.
    The share of a step depends only on its number, so a checkpoint needs only the mean and `start`.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        self.config = config
        fixed = isinstance(config.average_from, int) or config.average_from == 0
        self.start: int | None = int(config.average_from) if fixed and not config.average_patience else None
        self.parameters = dict(model.named_parameters())
        self.means = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int, done: float = 0.0) -> None:
        """Add the weights after `step` steps, when the fraction `done` of the run is completed."""
        if self.start is None and 0 < self.config.average_from <= done:
            self.start = step
        weights = [p.detach() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.means.values()), weights, self.share(step))

    def share(self, step: int) -> float:
        """Share of the weights after `step` steps in the mean, between 0 and 1."""
        taken = 0 if self.start is None else step - self.start
        if taken <= 0:
            return 1.0
        if self.config.averaging == "asgd":
            return 1.0 / taken
        # As in TensorFlow, the mean is short at first: a long one would still contain the initial weights.
        return 1.0 - min(self.config.average_decay, (1 + taken) / (10 + taken))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block the model's weights are the mean."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.means[name])
            self.means[name].copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        return self.means

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        copy_into(self.means, tensors, where)
