"""Sampling where every row of a batch has its own settings and its own random numbers."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from longspan.decoding.sampling import most_likely
from longspan.errors import ConfigError
from longspan.shapes import Float, Int, Tensor


@dataclass
class Draws:
    """Uniform random numbers. Number `count` of a seed is a hash of both, so two integers are the complete state."""

    seed: int
    count: int = 0

    def peek(self, ahead: int = 0) -> float:
        """Number `count + ahead`, 0 <= u < 1, with 52 bits."""
        message = b"longspan draws %d %d" % (self.seed, self.count + ahead)
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
    has_offsets: bool = field(init=False)
    """Whether anything is ever added to the logits."""

    def __post_init__(self) -> None:
        one = self.choosing
        self.has_offsets = bool(one.bias or one.presence_penalty or one.frequency_penalty)

    def offsets(self) -> dict[int, float]:
        """What is added to the logits."""
        found = dict(self.choosing.bias)
        presence, frequency = self.choosing.presence_penalty, self.choosing.frequency_penalty
        if presence or frequency:
            for token, count in self.counts.items():
                found[token] = found.get(token, 0.0) - presence - frequency * count
        return found

    def add(self, token: int) -> None:
        """A token was generated: its random number is used up, and penalties count it."""
        self.draws.count += self.choosing.temperature > 0
        if self.choosing.presence_penalty or self.choosing.frequency_penalty:
            self.counts[token] = self.counts.get(token, 0) + 1


class Plan(NamedTuple):
    """What a step needs to sample, on the device. It is made before the step is launched: a copy to the device in
    between would wait for the step."""

    uniform: Float[Tensor, "B 1"]
    temperature: Float[Tensor, "B 1"]
    top_p: Float[Tensor, "B 1"]
    """Infinity where it is off."""
    offsets: tuple[Tensor, Tensor, Tensor] | None
    """Row, token and value of everything that is added to the logits."""
    sampled: bool
    """Some row has a temperature above 0."""
    truncated: bool
    """Some row has a top_p below 1."""


def values_of(
    rows: Sequence[ChoosingRow | None], ahead: Sequence[int] | None = None
) -> list[tuple[float, float, float]]:
    """Random number, temperature and top_p of every row. `ahead[i]` tokens of row i were sampled before, but are not
    known to the row yet. Rows that are None get the token with the largest logit."""
    found = []
    for index, row in enumerate(rows):
        if row is None:
            found.append((0.0, 0.0, math.inf))
            continue
        one = row.choosing
        uniform = row.draws.peek(ahead[index] if ahead else 0) if one.temperature > 0 else 0.0
        found.append((uniform, one.temperature, one.top_p if one.top_p < 1 else math.inf))
    return found


def plan(rows: Sequence[ChoosingRow | None], device: torch.device, ahead: Sequence[int] | None = None) -> Plan:
    """The plan of one step. It changes no row: `ChoosingRow.add` does, when the token is known."""
    values = values_of(rows, ahead)
    packed = to_device(values, device, torch.float64)
    offsets = [
        (index, token, value)
        for index, row in enumerate(rows)
        if row is not None and row.has_offsets
        for token, value in row.offsets().items()
    ]
    added = None
    if offsets:
        places, tokens, amounts = zip(*offsets, strict=True)
        added = (to_device(places, device), to_device(tokens, device), to_device(amounts, device))
    sampled = any(temperature > 0 for _, temperature, _ in values)
    return plan_of(packed, added, sampled=sampled, truncated=any(limit < 1 for _, _, limit in values))


def plan_of(
    values: Float[Tensor, "B 3"],
    offsets: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    sampled: bool = True,
    truncated: bool = True,
) -> Plan:
    """A plan from the values of `values_of` on the device."""
    uniforms, temperatures, limits = (values[:, i : i + 1] for i in range(3))
    return Plan(uniforms, temperatures, limits, offsets, sampled, truncated)


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on the device. From pinned memory, so that the host does not wait for a GPU."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def choose(logits: Float[Tensor, "B V"], plan: Plan) -> Int[Tensor, "B"]:
    """The next token of every row, or -1 where the largest logit is not finite.

    Inversion of the cumulative distribution: one random number per row, drawn on the host.
    """
    logits = logits.float()
    if plan.offsets is not None:
        rows, tokens, values = plan.offsets
        logits = logits.clone()
        logits[rows, tokens] += values.to(logits.dtype)
    largest, chosen = logits.max(-1, keepdim=True)
    if plan.sampled:
        chosen = torch.where(plan.temperature > 0, _drawn(logits - largest, plan), chosen)
    return chosen.masked_fill(~largest.isfinite(), -1)[:, 0]


def _drawn(below: Float[Tensor, "B V"], plan: Plan) -> Int[Tensor, "B 1"]:
    """Tokens of the distribution; `below` are logits with the largest at 0, so that no quotient overflows."""
    chance = (below.double() / torch.where(plan.temperature > 0, plan.temperature, 1.0)).softmax(-1)
    if plan.truncated:
        chance = most_likely(chance, plan.top_p)
    total = chance.cumsum(-1)
    return (total <= plan.uniform * total[:, -1:]).sum(-1, keepdim=True).clamp(max=below.shape[1] - 1)
