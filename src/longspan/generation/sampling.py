"""Choosing the next token."""

import math
from dataclasses import dataclass

import torch

from longspan.errors import ConfigError
from longspan.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, top-p and min-p, in that order; temperature 0 takes the likeliest token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temp {self.temperature} must be a number of at least 0; 0 takes the likeliest token")
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k} must not be negative; 0 turns it off")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} must lie in (0, 1]; 1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"--min-p {self.min_p} must lie in [0, 1]; 0 turns it off")

    def choose(self, logits: Float[Tensor, "B V"], generator: torch.Generator) -> Int[Tensor, "B"]:
        """The next token of every row, or -1 where the largest logit is not finite.

        No host sync (safe for CUDA graphs): the caller checks the token when it copies it to the host. Multinomial
        never gets NaN, which on a GPU is a device-side assert that makes the device unusable for the process.
        """
        logits = logits.float()
        if self.temperature == 0 or self.top_k == 1:
            chosen = logits.argmax(-1)
            largest = logits.gather(-1, chosen[:, None])[:, 0]
            return chosen.masked_fill((largest - largest).isnan(), -1)
        chance = self.probabilities(logits)
        undefined = chance[:, 0].isnan()  # then all of the row is
        chosen = torch.multinomial(chance.masked_fill(undefined[:, None], 1.0), 1, generator=generator)[:, 0]
        return chosen.masked_fill(undefined, -1)

    def probabilities(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """What is drawn from: never empty, since the likeliest token always stays; NaN where the largest logit is not
        finite."""
        # The largest logit at 0 keeps every quotient at most 0; in float64 the smallest temperature is not yet 0.
        logits = (logits - logits.amax(-1, keepdim=True)).double() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            chance = ordered.softmax(-1)
            # A token is dropped if those before it already make up top_p.
            dropped = chance.cumsum(-1) - chance >= self.top_p
            dropped[..., 0] = False
            logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -math.inf)
        chance = logits.softmax(-1)
        if self.min_p > 0:
            chance = chance.masked_fill(chance < self.min_p * chance.amax(-1, keepdim=True), 0.0)
        return (chance / chance.sum(-1, keepdim=True)).float()
