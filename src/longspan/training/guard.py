"""Whether a step may touch the weights, decided on the device without anyone waiting for it."""

from collections.abc import Mapping

import torch

from longspan.checkpoints.weights import require_match
from longspan.shapes import Float, Tensor

SETTLED = 32
"""Steps after which the mean of the gradient's norm is worth comparing with."""
MEMORY = 0.98
RISE = 4.0
"""A spike is also this many times the mean: where the norm hardly moves, ten sigmas are little."""
PATIENCE = 8
"""So many spikes in a row are no spikes but a new level."""


class Guard:
    """Holds the weights still where loss or gradient is not finite (for good), or where the gradient spikes (for one
    step): its norm lies `sigmas` deviations above its running mean."""

    def __init__(self, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        self.count, self.mean, self.variance, self.row = torch.zeros(4, dtype=torch.float32, device=device).unbind()
        self.broken = torch.zeros((), dtype=torch.bool, device=device)

    def judge(self, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """1 where this step must leave the weights as they are, else 0; takes the step into account either way."""
        self.broken.logical_or_(~(torch.isfinite(loss) & torch.isfinite(norm)))
        high = torch.maximum(self.mean + self.sigmas * self.variance.sqrt(), RISE * self.mean)
        spike = (norm > high) & (self.count >= SETTLED) if self.sigmas else torch.zeros_like(self.broken)
        renewed = spike & (self.row >= PATIENCE)
        skip = self.broken | (spike & ~renewed)
        count = torch.where(renewed, 0.0, self.count)
        share = torch.clamp(1 / (count + 1), min=1 - MEMORY)
        gap = norm - self.mean
        mean = torch.where(renewed, norm, self.mean + share * gap)
        variance = torch.where(renewed, 0.0, (1 - share) * (self.variance + share * gap * gap))
        # In place: a recorded step finds them where it left them.
        self.row.copy_(torch.where(spike & ~renewed, self.row + 1, 0.0))
        for held, new in ((self.mean, mean), (self.variance, variance), (self.count, count + 1)):
            held.copy_(torch.where(skip, held, new))
        return skip.float()

    def tensors(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance, "row": self.row}

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        require_match(self.tensors(), tensors, where)
        for name, held in self.tensors().items():
            held.copy_(tensors[name])
