"""Probabilities computed by hand, and samples drawn from them."""

import pytest
import torch

from longspan.contract import Decoder, State
from longspan.decoding.samplers import sampler
from longspan.decoding.sampling import Sampling
from longspan.errors import ConfigError

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(temperature=0.5), [0.25, 0.0625, 0.0225, 0.01]),
        (Sampling(top_k=2), [0.5, 0.25, 0, 0]),
        (Sampling(top_p=0.5), [0.5, 0, 0, 0]),
        (Sampling(top_p=0.6), [0.5, 0.25, 0, 0]),
        (Sampling(top_p=0.9), [0.5, 0.25, 0.15, 0]),
        (Sampling(min_p=0.25), [0.5, 0.25, 0.15, 0]),
        (Sampling(top_k=3, min_p=0.4), [0.5, 0.25, 0, 0]),
        (Sampling(top_k=99), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(top_p=1e-9), [1, 0, 0, 0]),
        (Sampling(temperature=1e-6), [1, 0, 0, 0]),
    ],
)
def test_probabilities(sampling: Sampling, expected: list[float]) -> None:
    normalised = torch.tensor([expected]) / sum(expected)
    torch.testing.assert_close(sampling.probabilities(LOGITS), normalised, rtol=0, atol=1e-6)


def test_samples_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = Sampling(top_k=3).choose(LOGITS.expand(20_000, 4), generator)
    share = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.25, 0.15, 0]) / 0.9, rtol=0, atol=0.015)


def test_temperature_zero_is_greedy_for_every_seed() -> None:
    assert {int(Sampling(temperature=0).choose(LOGITS, torch.Generator().manual_seed(s))) for s in range(9)} == {0}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1, "temperature=-1"),
        ("temperature", float("nan"), "temperature=nan"),
        ("top_k", -1, "top_k=-1"),
        ("top_p", 0, "top_p=0"),
        ("top_p", 1.1, r"top_p=1\.1"),
        ("min_p", -0.1, r"min_p=-0\.1"),
        ("min_p", 2, "min_p=2"),
        ("presence_penalty", 101, "presence_penalty=101"),
        ("frequency_penalty", float("inf"), "frequency_penalty=inf"),
        ("repetition_penalty", 0, "repetition_penalty=0"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**{name: value})


ALL = [Sampling(), Sampling(temperature=0), Sampling(top_k=1), Sampling(0.7, top_k=2), Sampling(top_p=0.5),
       Sampling(min_p=0.1), Sampling(0.5, 3, 0.9, 0.1)]  # fmt: skip


@pytest.mark.parametrize("sampling", ALL)
def test_rows_with_non_finite_logits_give_minus_one(sampling: Sampling) -> None:
    """Other rows of the batch are sampled normally."""
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 4, [0.0, nan, 0.0, 0.0], [0.0, 0.0, 0.0, inf], [inf] * 4, [-inf] * 4, [nan, inf, -inf, 0.0]]
    rows += [[0.0, 1.0, 2.0, 3.0], [-inf, 1.0, -inf, -inf], [3e38, 0.0, -3e38, -inf]]
    chosen = sampling.choose(torch.tensor(rows), torch.Generator().manual_seed(0)).tolist()
    assert chosen[:6] == [-1] * 6
    assert 0 <= chosen[6] < 4
    assert chosen[7:] == [1, 0]


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({}, [2.0, -1.0, 0.5, 3.0]),
        ({"presence_penalty": 0.5}, [1.5, -1.5, 0.5, 3.0]),
        ({"frequency_penalty": 0.5}, [0.5, -1.5, 0.5, 3.0]),
        ({"repetition_penalty": 2}, [1.0, -2.0, 0.5, 3.0]),
        ({"repetition_penalty": 2, "frequency_penalty": 1, "presence_penalty": 0.25}, [-2.25, -3.25, 0.5, 3.0]),
    ],
)
def test_penalties(penalties: dict[str, float], expected: list[float]) -> None:
    logits, counts = torch.tensor([[2.0, -1.0, 0.5, 3.0]]), torch.tensor([[3.0, 1.0, 0.0, 0.0]])
    found = Sampling(**penalties).penalised(logits, counts)
    torch.testing.assert_close(found, torch.tensor([expected]).double())


class Constant(Decoder):
    """The same logits after every token."""

    def prefill(self, tokens: torch.Tensor) -> None: ...

    def launch(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[3.0, 2.5, 1.0, 99.0], [0.0, 0.0, 5.0, 99.0]])

    def state(self) -> State:
        raise NotImplementedError


def test_a_sampler_counts_the_tokens_it_chose_per_row() -> None:
    """By hand: every choice lowers that token of that row by 1. Token 3 is not known."""
    sample = sampler(Constant(), Sampling(temperature=0, frequency_penalty=1), torch.Generator(), known=3)
    token, chosen = torch.zeros(2, dtype=torch.int64), []
    for _ in range(5):
        token = sample(token)
        chosen.append(token.tolist())
    assert chosen == [[0, 2], [1, 2], [0, 2], [1, 2], [0, 2]]
