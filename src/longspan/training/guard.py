"""Decides on the device, without a host sync, whether a step may update the weights."""

from collections.abc import Mapping

import torch

from longspan.checkpoints.weights import require_match
from longspan.shapes import Float, Tensor

SETTLED = 32
"""Steps until the mean gradient norm is reliable."""
DECAY = 0.98
RISE = 4.0
"""A spike is also at least this many times the mean: if the norm is nearly constant, ten sigmas are a small change."""
PATIENCE = 8
"""More consecutive spikes than this are a new level."""


class Guard:
    """Blocks updates: all from the first loss or gradient that is not finite, or a single one when the gradient norm is
    `sigmas` standard deviations above its running mean (a spike)."""

    def __init__(self, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        self.count, self.mean, self.variance, self.streak = torch.zeros(4, dtype=torch.float32, device=device).unbind()
        self.broken = torch.zeros((), dtype=torch.bool, device=device)

    def check(self, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """1 if this step must not update the weights, else 0. Updates the statistics."""
        self.broken.logical_or_(~(torch.isfinite(loss) & torch.isfinite(norm)))
        high = torch.maximum(self.mean + self.sigmas * self.variance.sqrt(), RISE * self.mean)
        spike = (norm > high) & (self.count >= SETTLED) if self.sigmas else torch.zeros_like(self.broken)
        renewed = spike & (self.streak >= PATIENCE)
        skip = self.broken | (spike & ~renewed)
        count = torch.where(renewed, 0.0, self.count)
        share = torch.clamp(1 / (count + 1), min=1 - DECAY)
        gap = norm - self.mean
        mean = torch.where(renewed, norm, self.mean + share * gap)
        variance = torch.where(renewed, 0.0, (1 - share) * (self.variance + share * gap * gap))
        # In place, because a CUDA graph uses fixed addresses.
        self.streak.copy_(torch.where(spike & ~renewed, self.streak + 1, 0.0))
        for old, new in ((self.mean, mean), (self.variance, variance), (self.count, count + 1)):
            old.copy_(torch.where(skip, old, new))
        return skip.float()

    def tensors(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance, "row": self.streak}

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        require_match(self.tensors(), tensors, where)
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
