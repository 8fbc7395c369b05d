"""Sampling with settings per row, against probabilities computed by hand."""

import math

import pytest
import torch

from longspan.decoding.choosing import Choosing, ChoosingRow, Draws, plan
from longspan.decoding.choosing import choose as choose_planned
from longspan.decoding.sampling import Sampling
from longspan.errors import ConfigError

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0])


def choose(logits: torch.Tensor, rows: list[ChoosingRow | None]) -> torch.Tensor:
    return choose_planned(logits, plan(rows, logits.device))


def row(seed: int = 0, **settings: object) -> ChoosingRow:
    return ChoosingRow(Choosing(**settings), Draws(seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_p": 0.7}, {"temperature": 1.7, "top_p": 0.9}])
def test_frequencies(settings: dict[str, float]) -> None:
    """4,000 draws: every frequency within 5 standard deviations of the probability."""
    expected = Sampling(**settings).probabilities(LOGITS[None])[0].tolist()
    width, counts = 50, [0] * 5
    rows = [row(seed, **settings) for seed in range(width)]
    for _ in range(80):
        for one, token in zip(rows, choose(LOGITS.expand(width, -1), rows).tolist(), strict=True):
            one.add(token)
            counts[token] += 1
    for count, chance in zip(counts, expected, strict=True):
        assert abs(count - 4000 * chance) <= 5 * math.sqrt(4000 * chance * (1 - chance)), (counts, expected)


def test_rows_have_their_own_settings() -> None:
    """A row gives the same token in any company, and None rows draw nothing."""
    rows = {"a": {"top_p": 0.5}, "b": {"temperature": 0.0}, "c": {"temperature": 1.5}, "d": {"bias": {2: 50.0}}}
    alone = {name: choose(LOGITS[None], [row(7, **settings)]).tolist()[0] for name, settings in rows.items()}
    together = choose(LOGITS.expand(5, -1), [*(row(7, **settings) for settings in rows.values()), None])
    assert together.tolist()[:4] == [*alone.values()]
    assert alone["b"] == 1
    assert alone["d"] == 2


def test_penalties_by_hand() -> None:
    """Logits 2.0 and 1.2 lead. With presence 1 the second wins after one use of the first; with frequency 0.5 after
    two."""
    for settings, expected in (
        ({"presence_penalty": 1.0}, [1, 3, 1, 1]),  # 2, then 1 < 1.2, then 1 against 0.2
        ({"frequency_penalty": 0.5}, [1, 1, 3, 1]),  # 2, 1.5, then 1 < 1.2, then 1 against 0.7
        ({}, [1, 1, 1, 1]),
    ):
        one, found = row(0, temperature=0.0, **settings), []
        for _ in range(4):
            found += choose(LOGITS[None], [one]).tolist()
            one.add(found[-1])
        assert found == expected


def test_draws_continue() -> None:
    first = [Draws(5).peek(ahead) for ahead in range(4)]
    assert [Draws(5, count).peek() for count in range(4)] == first
    assert len({*first, *(Draws(6, count).peek() for count in range(4))}) == 8
    assert all(0 <= value < 1 for value in first)


def test_logits_that_are_not_finite() -> None:
    bad = torch.stack([LOGITS, LOGITS * math.nan, LOGITS + math.inf])
    assert choose(bad, [row(temperature=0.0), row(), row(temperature=0.0)]).tolist() == [1, -1, -1]


def test_smallest_temperature() -> None:
    assert choose(LOGITS[None], [row(temperature=1e-300)]).tolist() == [1]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}, {"bias": {1: math.inf}}],
)
def test_invalid_settings(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(settings)))):
        row(**settings)
