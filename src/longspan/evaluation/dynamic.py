"""Dynamic evaluation: a model goes on learning from what it has just been scored on (Krause et al. 2018, 2019).

A segment is scored first and learnt from afterwards, so no loss ever knows its own target. With g the gradient of a
segment's mean loss, v the mean of g^2 over the segments so far and theta_0 the weights it came with:

    theta <- theta - rate g / (sqrt(v) + epsilon) + decay (theta_0 - theta)

Krause et al. take v from the training text; ours comes from the text that is scored, so that a model alone is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.contract import LanguageModel, State
from longspan.errors import ConfigError
from longspan.evaluation.likelihood import Ids, Stretch, pieces_of
from longspan.memory.recording import RecordedStep
from longspan.shapes import Bool, Float, Int, Tensor

EPSILON = 1e-8


@dataclass(frozen=True)
class Dynamics:
    """How fast a model follows the text, and how strongly it is held to what it was."""

    rate: float = 5e-5
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ConfigError(f"--dynamic-rate {self.rate} must lie between 0 and 1; 5e-5 is one to begin with")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"--dynamic-decay {self.decay} must lie in [0, 1)")


def dynamic_losses(
    model: LanguageModel,
    ids: Ids,
    *,
    segment: int,
    starts: NDArray[np.int64] | None = None,
    dynamics: Dynamics | None = None,
    products: torch.dtype | None = None,
) -> Iterator[Stretch]:
    """Every loss of a text, each scored before the model learns from it; afterwards the weights are what they were.

    One stream, since lanes would learn from text ahead of what others have yet to score. Memory is carried as hidden
    states: keys and values projected by weights that have moved since would be stale. `products` may be of a shorter
    dtype than the weights, as in training. On a GPU the work is recorded and replayed.
    """
    pieces = pieces_of(model, ids, segment=segment, lanes=1, starts=starts)
    follower = Follower(model, dynamics or Dynamics(), products)
    recorded = RecordedStep(follower.read)
    before, state = None, None
    try:
        for piece in pieces:
            state = _training_state(model) if state is None else state
            # Neither the segments that fill a memory nor the shorter one at the end can be recorded as the others.
            shapes = state.shapes
            usual = shapes == before and piece.tokens.shape[1] == segment
            before = shapes
            read = recorded if usual and model.recordable else follower.read
            losses, (state,) = read([state], piece.tokens, piece.targets, piece.starts)
            yield from piece.stretches(losses)
    finally:
        follower.restore()


def _training_state(model: LanguageModel) -> State:
    """An empty state of the form that training carries; dropout stays as it is."""
    mode = model.training
    model.train()
    state = model.initial_state(1)
    model.train(mode)
    return state


class Follower:
    """The weights on their way through a text, and those they began with."""

    def __init__(self, model: LanguageModel, dynamics: Dynamics, products: torch.dtype | None = None) -> None:
        self.model, self.dynamics, self.products = model, dynamics, products
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.first = [weight.detach().clone() for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.first]
        # A tensor: a recording would hold a number for ever.
        self.steps = torch.zeros((), device=self.weights[0].device)

    def read(
        self,
        states: list[State],
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        starts: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], list[State]]:
        """A segment's losses and the states after it; then a step on their mean."""
        device = tokens.device.type
        with torch.enable_grad():
            # Entered for every segment: what it has rounded is kept until it is left, and the weights move.
            with torch.autocast(device, self.products, enabled=self.products is not None):
                losses, state = self.model.losses(tokens, targets, states[0], starts)
            gradients = torch.autograd.grad(losses.mean(), self.weights, allow_unused=True)
        with torch.no_grad():
            self.learn(gradients)
        return losses.detach(), [state.detach()]

    def learn(self, gradients: tuple[Tensor | None, ...]) -> None:
        """All weights at once, in a call for each operation and not for each weight."""
        self.steps += 1
        rows = zip(self.weights, self.first, self.squares, gradients, strict=True)
        used = [row for row in rows if row[3] is not None]
        weights, first, squares, g = (list(column) for column in zip(*used, strict=True))
        torch._foreach_addcmul_(squares, g, g)
        roots = torch._foreach_div(squares, self.steps)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, EPSILON)
        if self.dynamics.decay:
            torch._foreach_lerp_(weights, first, self.dynamics.decay)
        torch._foreach_addcdiv_(weights, g, roots, value=-self.dynamics.rate)

    def restore(self) -> None:
        with torch.no_grad():
            for weight, first in zip(self.weights, self.first, strict=True):
                weight.copy_(first)
