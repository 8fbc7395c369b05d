"""Adaptive computation time for every position (Graves 2016)."""

import torch

from longspan.shapes import Bool, Float, Int, Tensor


class Ponder:
    """Which positions are still running, and the weight of each step in their output.

    A position halts at the first step N with p_1 + ... + p_N above the threshold, and at the last step in any case. The
    weight of step t < N is p_t, that of step N the remainder 1 - (p_1 + ... + p_{N-1}), so weights sum to 1. The cost
    is N + remainder, of which only the remainder has a gradient.
    """

    def __init__(self, like: Float[Tensor, "B T"], threshold: float) -> None:
        self.threshold = threshold
        self.total: Float[Tensor, "B T"] = torch.zeros_like(like)
        self.remainder: Float[Tensor, "B T"] = torch.zeros_like(like)
        self.running: Bool[Tensor, "B T"] = torch.ones_like(like, dtype=torch.bool)
        self.steps: Int[Tensor, "B T"] = torch.zeros_like(like, dtype=torch.int64)

    def step(self, probability: Float[Tensor, "B T"], last: bool) -> Float[Tensor, "B T"]:
        """The weight of this step; 0 for positions that have already halted."""
        halts = self.running & ((self.total + probability > self.threshold) | last)
        continues = self.running & ~halts
        rest = torch.where(halts, 1 - self.total, 0.0)
        weights = torch.where(continues, probability, rest)
        self.total = self.total + torch.where(continues, probability, 0.0)
        self.remainder = self.remainder + rest
        self.steps = self.steps + self.running
        self.running = continues
        return weights

    def cost(self) -> Float[Tensor, ""]:
        """The mean of steps and remainder."""
        return (self.steps + self.remainder).mean()
