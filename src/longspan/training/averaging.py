"""Averages of the weights over steps, which often score better than the weights of any one step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from longspan.checkpoints.weights import require_match
from longspan.shapes import Tensor
from longspan.training.recipe import TrainingConfig


class Average:
    """`ema`: an exponential mean; `asgd`: the plain mean since some step (Polyak & Juditsky 1992).

    That step is `average_from`, or with `average_patience` the one at which validation stops improving (None until
    then). Before it the mean is the weights themselves. How much a step weighs follows from the step's number, so
    there is nothing to save but the mean and the beginning.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        self.config = config
        self.began: int | None = None if config.average_patience else config.average_from
        self.parameters = dict(model.named_parameters())
        self.means = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as they are after `step` steps."""
        weights = [p.detach() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.means.values()), weights, self.share(step))

    def share(self, step: int) -> float:
        """What the weights after `step` steps add to the mean, between 0 and 1."""
        taken = 0 if self.began is None else step - self.began
        if taken <= 0:
            return 1.0
        if self.config.averaging == "asgd":
            return 1.0 / taken
        # Early on a long mean would still hold the initial weights: as in TensorFlow's, it is short at first.
        return 1.0 - min(self.config.average_decay, (1 + taken) / (10 + taken))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block the model has the mean for its weights."""
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
        require_match(self.means, tensors, where)
        for name, mean in self.means.items():
            mean.copy_(tensors[name])
