"""Synthetic sources with a known dependency length and a known entropy rate.

An ideal predictor knows the source and the position in the block, and sees only the last `context` tokens. Its losses
are the reference for a measure of context length. No model can have a loss per token below `entropy_rate`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.errors import ConfigError

Ids = NDArray[np.int64]
Positions = NDArray[np.int64]


class SyntheticSource(ABC):
    """An infinite stream of tokens made of independent blocks of the same distribution."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """The number of token ids."""

    @property
    @abstractmethod
    def entropy_rate(self) -> float:
        """Nats per token, over all tokens, of a predictor that knows the source and all previous tokens."""

    @abstractmethod
    def sample(self, tokens: int, *, seed: int = 0) -> Ids:
        """The first `tokens` tokens of a stream, which starts with a block."""

    @abstractmethod
    def targets(self, tokens: int) -> Positions:
        """The positions below `tokens` whose token depends on earlier tokens."""

    @abstractmethod
    def ideal_losses(self, ids: Ids, targets: Positions, context: int) -> NDArray[np.float64]:
        """The loss in nats of an ideal predictor on each target, given the `context` tokens before it."""


@dataclass(frozen=True)
class MarkedLag(SyntheticSource):
    """Blocks of `d` symbols, a marker for a lag k, and the symbol k positions before the marker; k uniform on 1..d.

        x_1 ... x_d  [k]  x_{d+1-k}        symbols are 0..symbols-1, the marker of lag k is symbols + k - 1

    Each block has one marker, so the answer can only be found in the symbol itself, k + 1 tokens back.
    """

    d: int
    symbols: int = 16

    def __post_init__(self) -> None:
        _at_least(1, d=self.d)
        _at_least(2, symbols=self.symbols)

    @property
    def vocabulary(self) -> int:
        return self.symbols + self.d

    @property
    def entropy_rate(self) -> float:
        return (self.d * math.log(self.symbols) + math.log(self.d)) / (self.d + 2)

    def sample(self, tokens: int, *, seed: int = 0) -> Ids:
        random, blocks = np.random.default_rng(seed), -(-tokens // (self.d + 2))
        text = random.integers(0, self.symbols, (blocks, self.d))
        lag = random.integers(1, self.d + 1, (blocks, 1))
        answer = np.take_along_axis(text, self.d - lag, axis=1)
        return np.concatenate([text, self.symbols + lag - 1, answer], axis=1).reshape(-1)[:tokens]

    def targets(self, tokens: int) -> Positions:
        return np.arange(self.d + 1, tokens, self.d + 2)

    def ideal_losses(self, ids: Ids, targets: Positions, context: int) -> NDArray[np.float64]:
        lag = ids[targets - 1] - self.symbols + 1
        return np.where(lag + 1 <= context, 0.0, math.log(self.symbols))


@dataclass(frozen=True)
class ExactLag(SyntheticSource):
    """x_t is x_{t-d} with probability 1 - noise, else a uniform symbol; the first d symbols are uniform.

    All information is exactly d tokens back: a context below d is worth nothing, and one of d or more is worth the
    same.
    """

    d: int
    symbols: int = 8
    noise: float = 0.3

    def __post_init__(self) -> None:
        _at_least(1, d=self.d)
        _at_least(2, symbols=self.symbols)
        if not 0 <= self.noise <= 1:
            raise ConfigError(f"noise={self.noise} must be between 0 and 1")

    @property
    def vocabulary(self) -> int:
        return self.symbols

    @property
    def entropy_rate(self) -> float:
        """Of the tokens from position d on."""
        same, other = self._probabilities
        return -_xlogx(same) - (self.symbols - 1) * _xlogx(other)

    @property
    def _probabilities(self) -> tuple[float, float]:
        """The probability of the symbol d tokens back, and that of each other symbol."""
        other = self.noise / self.symbols
        return 1 - self.noise + other, other

    def sample(self, tokens: int, *, seed: int = 0) -> Ids:
        random, rows = np.random.default_rng(seed), -(-tokens // self.d)
        ids = random.integers(0, self.symbols, (rows, self.d))
        copied = random.random((rows, self.d)) >= self.noise
        for row in range(1, rows):
            ids[row] = np.where(copied[row], ids[row - 1], ids[row])
        return ids.reshape(-1)[:tokens]

    def targets(self, tokens: int) -> Positions:
        return np.arange(self.d, tokens)

    def ideal_losses(self, ids: Ids, targets: Positions, context: int) -> NDArray[np.float64]:
        if context < self.d:
            return np.full(len(targets), math.log(self.symbols))
        same, other = self._probabilities
        with np.errstate(divide="ignore"):  # with noise 0 another symbol has probability 0
            return -np.log(np.where(ids[targets] == ids[targets - self.d], same, other))


@dataclass(frozen=True)
class Copy(SyntheticSource):
    """Blocks of `d` symbols, a marker, the same symbols again, a marker: each answer is d + 1 tokens back."""

    d: int
    symbols: int = 16

    def __post_init__(self) -> None:
        _at_least(1, d=self.d)
        _at_least(2, symbols=self.symbols)

    @property
    def vocabulary(self) -> int:
        return self.symbols + 2

    @property
    def entropy_rate(self) -> float:
        return self.d * math.log(self.symbols) / (2 * self.d + 2)

    def sample(self, tokens: int, *, seed: int = 0) -> Ids:
        blocks = -(-tokens // (2 * self.d + 2))
        text = np.random.default_rng(seed).integers(0, self.symbols, (blocks, self.d))
        middle, end = np.full((blocks, 1), self.symbols), np.full((blocks, 1), self.symbols + 1)
        return np.concatenate([text, middle, text, end], axis=1).reshape(-1)[:tokens]

    def targets(self, tokens: int) -> Positions:
        position = np.arange(tokens)
        within = position % (2 * self.d + 2)
        return position[(within > self.d) & (within < 2 * self.d + 1)]

    def ideal_losses(self, ids: Ids, targets: Positions, context: int) -> NDArray[np.float64]:
        del ids  # the copy is exact, so only the context matters
        return np.full(len(targets), 0.0 if context > self.d else math.log(self.symbols))


@dataclass(frozen=True)
class AssociativeRecall(SyntheticSource):
    """Blocks of `pairs` keys and values, a marker, one of the keys, its value.

        k_1 v_1 ... k_n v_n  [?]  k_j  v_j

    Ids: values first, then keys, then the marker. The keys of a block are distinct. The key of pair j = 1..n is
    2(n - j) + 4 tokens before the answer.
    """

    pairs: int
    keys: int = 32
    values: int = 16

    def __post_init__(self) -> None:
        _at_least(1, pairs=self.pairs)
        _at_least(2, values=self.values)
        if self.keys < self.pairs:
            raise ConfigError(f"keys={self.keys} must be at least pairs={self.pairs}, because keys are distinct")

    @property
    def vocabulary(self) -> int:
        return self.values + self.keys + 1

    @property
    def entropy_rate(self) -> float:
        orders = math.lgamma(self.keys + 1) - math.lgamma(self.keys - self.pairs + 1)
        return (orders + self.pairs * math.log(self.values) + math.log(self.pairs)) / self._block

    @property
    def _block(self) -> int:
        return 2 * self.pairs + 3

    def sample(self, tokens: int, *, seed: int = 0) -> Ids:
        random, blocks = np.random.default_rng(seed), -(-tokens // self._block)
        keys = random.permuted(np.tile(np.arange(self.keys), (blocks, 1)), axis=1)[:, : self.pairs] + self.values
        values = random.integers(0, self.values, (blocks, self.pairs))
        query = random.integers(0, self.pairs, (blocks, 1))
        text = np.stack([keys, values], axis=2).reshape(blocks, -1)
        marker = np.full((blocks, 1), self.values + self.keys)
        query_key, answer = (np.take_along_axis(table, query, axis=1) for table in (keys, values))
        return np.concatenate([text, marker, query_key, answer], axis=1).reshape(-1)[:tokens]

    def targets(self, tokens: int) -> Positions:
        return np.arange(self._block - 1, tokens, self._block)

    def ideal_losses(self, ids: Ids, targets: Positions, context: int) -> NDArray[np.float64]:
        uniform = math.log(self.values)
        if context < 1:
            return np.full(len(targets), uniform)
        # `seen` pairs are in the context with their key. Of the pair before them, the value alone may be in it.
        seen = min(self.pairs, max(0, (context - 2) // 2))
        hidden, half = self.pairs - seen, context >= 3 and context % 2 == 1 and seen < self.pairs
        key_positions = targets[:, None] - 2 - 2 * np.arange(1, seen + 1)
        found = (ids[key_positions] == ids[targets - 1][:, None]).any(axis=1)
        probability = np.full(len(targets), 1 / self.values)
        if half:
            lone_value = ids[targets - 2 * seen - 3]
            probability = (1 - 1 / hidden) / self.values + (lone_value == ids[targets]) / hidden
        return np.where(found, 0.0, -np.log(np.where(probability > 0, probability, 1.0)))


SOURCES: dict[str, type[SyntheticSource]] = {
    "marked-lag": MarkedLag,
    "exact-lag": ExactLag,
    "copy": Copy,
    "associative-recall": AssociativeRecall,
}


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")


def _xlogx(x: float) -> float:
    return x * math.log(x) if x > 0 else 0.0
