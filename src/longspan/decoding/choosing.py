"""Sampling where every row of a batch has its own settings and its own random numbers."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from longspan.errors import ConfigError
from longspan.shapes import Float, Int, Tensor


@dataclass
class Draws:
    """Uniform random numbers. Number `count` of a seed is a hash of both, so two integers are the complete state."""

    seed: int
    count: int = 0

    def next(self) -> float:
        """The next number, 0 <= u < 1, with 52 bits."""
        message = b"longspan draws %d %d" % (self.seed, self.count)
        self.count += 1
        return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 12) * 2.0**-52


@dataclass(frozen=True)
class Choosing:
    """How the tokens of a row are sampled. Penalties count the tokens that were generated, not the prompt."""

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of some tokens."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("temperature", 0.0, 1000.0),
            ("presence_penalty", -1000.0, 1000.0),
            ("frequency_penalty", -1000.0, 1000.0),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name}={value} must be between {least:g} and {most:g}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1; 1 turns it off")
        for token, value in self.bias.items():
            if not math.isfinite(value):
                raise ConfigError(f"the bias {value} of token {token} must be finite")


@dataclass
class ChoosingRow:
    """A row that is being sampled: settings, random numbers and the tokens generated so far."""

    choosing: Choosing
    draws: Draws
    counts: dict[int, int] = field(default_factory=dict)

    def offsets(self) -> dict[int, float]:
        """What is added to the logits."""
        found = dict(self.choosing.bias)
        presence, frequency = self.choosing.presence_penalty, self.choosing.frequency_penalty
        if presence or frequency:
            for token, count in self.counts.items():
                found[token] = found.get(token, 0.0) - presence - frequency * count
        return found

    def add(self, token: int) -> None:
        if self.choosing.presence_penalty or self.choosing.frequency_penalty:
            self.counts[token] = self.counts.get(token, 0) + 1


def choose(logits: Float[Tensor, "B V"], rows: Sequence[ChoosingRow | None]) -> Int[Tensor, "B"]:
    """The next token of every row, or -1 where the largest logit is not finite. Rows that are None draw nothing, and
    their tokens mean nothing.

    Inversion of the cumulative distribution: one random number per row, drawn on the host.
    """
    logits = logits.float()
    offsets = [(i, row.offsets()) for i, row in enumerate(rows) if row is not None]
    if any(found for _, found in offsets):
        index = [(i, token, value) for i, found in offsets for token, value in found.items()]
        i, token, value = (torch.tensor(part, device=logits.device) for part in zip(*index, strict=True))
        logits = logits.clone()
        logits[i, token] += value.to(logits.dtype)
    largest = logits.amax(-1, keepdim=True)
    settings = [Choosing() if row is None else row.choosing for row in rows]
    chosen = logits.argmax(-1)
    if any(row is not None and row.choosing.temperature > 0 for row in rows):
        uniform = [row.draws.next() if row is not None and row.choosing.temperature > 0 else 0.0 for row in rows]
        drawn = _drawn(logits - largest, settings, uniform)
        greedy = torch.tensor([one.temperature == 0 for one in settings], device=logits.device)
        chosen = torch.where(greedy, chosen, drawn)
    broken = ~largest[:, 0].isfinite()
    return chosen.masked_fill(broken, -1)


def _drawn(below: Float[Tensor, "B V"], settings: Sequence[Choosing], uniform: Sequence[float]) -> Int[Tensor, "B"]:
    """Tokens of the distribution; `below` are logits with the largest at 0, so that no quotient overflows."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=below.device)[:, None]

    scaled = below.double() / column([one.temperature or 1.0 for one in settings])
    chance = scaled.softmax(-1)
    if any(one.top_p < 1 for one in settings):
        ordered, order = chance.sort(dim=-1, descending=True, stable=True)
        # A token is dropped if the tokens before it already sum to top_p.
        limit = column([one.top_p if one.top_p < 1 else math.inf for one in settings])
        dropped = ordered.cumsum(-1) - ordered >= limit
        dropped[..., 0] = False
        chance = chance.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
    total = chance.cumsum(-1)
    return (total <= column(uniform) * total[:, -1:]).sum(-1).clamp(max=below.shape[1] - 1)
