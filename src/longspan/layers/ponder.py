"""Adaptive computation time, position by position (Graves 2016)."""

import torch

from longspan.shapes import Bool, Float, Int, Tensor


class Ponder:
    """Which positions still compute, and what each step counts for in their output.

    A position halts at the first step N at which its probabilities p_1 + ... + p_N exceed the threshold, at the last
    step in any case. Step t < N counts p_t, step N the remainder 1 - (p_1 + ... + p_{N-1}): together 1. Its cost is
    N + remainder, of which only the remainder has a gradient.
    """

    def __init__(self, like: Float[Tensor, "B T"], threshold: float) -> None:
        self.threshold = threshold
        self.spent: Float[Tensor, "B T"] = torch.zeros_like(like)
        self.remainder: Float[Tensor, "B T"] = torch.zeros_like(like)
        self.running: Bool[Tensor, "B T"] = torch.ones_like(like, dtype=torch.bool)
        self.steps: Int[Tensor, "B T"] = torch.zeros_like(like, dtype=torch.int64)

    def step(self, probability: Float[Tensor, "B T"], last: bool) -> Float[Tensor, "B T"]:
        """What this step counts for; 0 where a position has halted before."""
        halts = self.running & ((self.spent + probability > self.threshold) | last)
        goes_on = self.running & ~halts
        rest = torch.where(halts, 1 - self.spent, 0.0)
        counts = torch.where(goes_on, probability, rest)
        self.spent = self.spent + torch.where(goes_on, probability, 0.0)
        self.remainder = self.remainder + rest
        self.steps = self.steps + self.running
        self.running = goes_on
        return counts

    def cost(self) -> Float[Tensor, ""]:
        """The mean of steps and remainder."""
        return (self.steps + self.remainder).mean()
