"""Sampling of the next token."""

import math
from dataclasses import asdict, dataclass

import torch

from longspan.config import convert_fields
from longspan.errors import ConfigError
from longspan.kernels import sampling as kernel
from longspan.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Sampling:
    """Penalties, then temperature, top-k, top-p and min-p, in that order. Temperature 0 is greedy.

    Penalties lower the logits of tokens that were generated before; the prompt does not count. For a token that was
    generated n > 0 times: positive logits are divided by `repetition_penalty` and negative ones multiplied by it
    (Keskar et al. 2019), then `frequency_penalty` * n + `presence_penalty` is subtracted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        convert_fields(self)
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} must be at least 0; 0 is greedy")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be at least 0; 0 turns it off")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1; 1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p} must be between 0 and 1; 0 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -100 <= getattr(self, name) <= 100:
                raise ConfigError(f"{name}={getattr(self, name)} must be between -100 and 100; 0 turns it off")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} must be between 0.01 and 100; 1 turns it off"
            )

    @property
    def greedy(self) -> bool:
        """Whether no random numbers are needed."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether `choose` needs the counts of generated tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def penalised(self, logits: Float[Tensor, "B V"], counts: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """The logits after the penalties, in float64. `counts` has how often each token was generated."""
        logits, seen, r = logits.double(), counts > 0, self.repetition_penalty
        if r != 1:
            logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
        return logits - self.frequency_penalty * counts - self.presence_penalty * seen

    def choose(
        self,
        logits: Float[Tensor, "B V"],
        generator: torch.Generator,
        counts: Float[Tensor, "B V"] | None = None,
    ) -> Int[Tensor, "B"]:
        """The next token of every row, or -1 where the largest logit is not finite. `counts` are for the penalties.

        No host sync (safe for CUDA graphs): the caller checks the token when it copies it to the host.
        """
        if kernel.supports(logits):
            return self._choose_fused(logits, generator, counts)
        logits = logits.float() if counts is None else self.penalised(logits, counts)
        if self.greedy:
            chosen = logits.argmax(-1)
            largest = logits.gather(-1, chosen[:, None])[:, 0]
            return chosen.masked_fill((largest - largest).isnan(), -1)
        chance = self.probabilities(logits)
        # An exponential race. `torch.multinomial` computes the same, but asserts on the device that nothing is NaN. It
        # takes a dozen kernels for that, and a failed assert makes the device unusable for the process.
        race = chance / torch.empty_like(chance).exponential_(1, generator=generator)
        return race.argmax(-1).masked_fill(chance[:, 0].isnan(), -1)  # NaN in one place is NaN in all of the row

    def _choose_fused(
        self, logits: Float[Tensor, "B V"], generator: torch.Generator, counts: Float[Tensor, "B V"] | None
    ) -> Int[Tensor, "B"]:
        """The same distribution from one kernel. It inverts the cumulative distribution instead of racing, so a seed
        gives other tokens than on a CPU, as any generator of a GPU does."""
        uniform = None
        if not self.greedy:
            uniform = torch.rand(len(logits), dtype=torch.float64, device=logits.device, generator=generator)
        return kernel.choose_tokens(logits, uniform, counts=counts, **asdict(self))

    def probabilities(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """The distribution to sample from. The most likely token always remains; NaN where the largest logit is not
        finite."""
        # With the largest logit at 0 no quotient overflows; in float64 the smallest temperature does not round to 0.
        logits = (logits - logits.amax(-1, keepdim=True)).double() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        chance = logits.softmax(-1)
        if self.top_p < 1:
            chance = most_likely(chance, self.top_p)
        if self.min_p > 0:
            chance = chance.masked_fill(chance < self.min_p * chance.amax(-1, keepdim=True), 0.0)
        return (chance / chance.sum(-1, keepdim=True)).float()


def most_likely(chance: Float[Tensor, "B V"], top_p: float | Float[Tensor, "B 1"]) -> Float[Tensor, "B V"]:
    """The probabilities of the fewest tokens that sum to `top_p`, most likely first, and 0 for the others."""
    ordered, order = chance.sort(dim=-1, descending=True, stable=True)
    # A token is dropped if the tokens before it already sum to top_p.
    dropped = ordered.cumsum(-1) - ordered >= top_p
    dropped[..., 0] = False
    return chance.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
