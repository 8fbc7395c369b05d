"""The sampling kernel against the distribution of `Sampling`, which computes it in float64 with torch's sort."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from longspan.decoding.sampling import Sampling

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 12 if DEVICE == "cpu" else 512


def frequencies(settings: Sampling, logits: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """How often each token is chosen for evenly spaced uniform numbers: within 1 / ROWS of its probability."""
    from longspan.kernels.sampling import choose_tokens

    uniform = (torch.arange(ROWS, dtype=torch.float64, device=DEVICE) + 0.5) / ROWS
    spread = None if counts is None else counts.expand(ROWS, -1).contiguous()
    chosen = choose_tokens(logits.expand(ROWS, -1).contiguous(), uniform, counts=spread, **asdict(settings))
    return torch.bincount(chosen, minlength=logits.shape[1]).double().cpu() / ROWS


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"top_k": 4, "top_p": 0.8, "temperature": 1.3, "min_p": 0.05},
        {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        *(
            pytest.param(values, marks=pytest.mark.torture)
            for values in ({"temperature": 0.5, "top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 1e-40})
        ),
    ],
)
def test_tokens_follow_the_distribution(values: dict[str, Any]) -> None:
    settings = Sampling(**values)
    torch.manual_seed(3)
    logits = torch.randn(1, 9, device=DEVICE) * 2
    logits[0, 3] = logits[0, 5]  # equal tokens are ordered by their index
    counts = torch.randint(0, 3, (1, 9), device=DEVICE).float() if settings.penalises else None
    penalised = logits if counts is None else settings.penalised(logits, counts)
    wanted = settings.probabilities(penalised)[0].double().cpu()
    found = frequencies(settings, logits, counts)
    assert (found - wanted).abs().max() <= 1 / ROWS + 1e-6
    assert not found[wanted == 0].any()


def test_greedy_tokens_and_rows_that_are_not_finite() -> None:
    from longspan.kernels.sampling import choose_tokens

    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, float("nan"), 0.0], [float("inf"), 0.0, 1.0]], device=DEVICE)
    assert choose_tokens(logits, None).tolist() == [1, -1, -1]
    uniform = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    assert choose_tokens(logits, uniform).tolist()[1:] == [-1, -1]


KNOWN_ANSWERS = [  # key, counter and words of philox4x32-10 in the test vectors of Random123
    (0x0, (0x0, 0x0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (2**64 - 1, 2**64 - 1), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (0x299F31D0A4093822, (0x85A308D3243F6A88, 0x0370734413198A2E), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def philox(seed: int, draw: int, row: int) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    mask = 2**32 - 1
    key, counter = [seed & mask, seed >> 32], [draw & mask, draw >> 32, row & mask, row >> 32]
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(high >> 32) ^ counter[1] ^ key[0], high & mask, (low >> 32) ^ counter[3] ^ key[1], low & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def uniform(seed: int, draw: int, row: int) -> float:
    words = philox(seed, draw, row)
    return (words[0] ^ (words[1] << 21)) * 2.0**-53 + 2.0**-54


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def test_random_words_are_the_published_ones() -> None:
    from tests.kernels.philox_kernel import words_kernel

    given = torch.tensor([[signed(seed), *map(signed, counter)] for seed, counter, _ in KNOWN_ANSWERS], device=DEVICE)
    words = torch.zeros(len(given), 4, dtype=torch.int64, device=DEVICE)
    numbers = torch.zeros(len(given), dtype=torch.float64, device=DEVICE)
    words_kernel[(len(given),)](given, words, numbers)
    assert words.tolist() == [list(expected) for *_, expected in KNOWN_ANSWERS]
    assert words.tolist() == [philox(seed, *counter) for seed, counter, _ in KNOWN_ANSWERS]
    assert numbers.tolist() == [uniform(seed, *counter) for seed, counter, _ in KNOWN_ANSWERS]


@pytest.mark.parametrize("values", [{"temperature": 1.5}, {"temperature": 0.0, "frequency_penalty": 0.5}])
def test_a_step_finds_what_the_one_before_it_left(values: dict[str, Any]) -> None:
    """Draws, turns, tokens and counts advance by themselves, and tokens are those of the same numbers given."""
    from longspan.kernels.sampling import Places, choose_tokens

    settings = Sampling(**values)
    torch.manual_seed(3)
    steps = torch.randn(3, 2, 7, device=DEVICE)
    steps[1, 1, 4] = float("nan")
    seed, first = -(2**60) - 12345, 2**32 - 2
    random = torch.tensor([[seed, first, 5]] * 2, device=DEVICE)
    places = Places(torch.zeros(2, dtype=torch.int64, device=DEVICE), random, torch.full((2, 2), -7, device=DEVICE))
    counts = torch.zeros(2, 7, device=DEVICE) if settings.penalises else None
    expected_counts = None if counts is None else counts.clone()
    for n, logits in enumerate(steps):
        numbers = [uniform(seed + 2**64, first + n, row) for row in range(2)]
        given = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
        expected = choose_tokens(logits, given, counts=expected_counts, **asdict(settings))
        fed = choose_tokens(logits, places=places, counts=counts, **asdict(settings))
        assert fed is places.tokens
        assert places.found is not None
        assert places.found[(5 + n) % 2].tolist() == expected.tolist()
        assert fed.tolist() == expected.clamp(min=0).tolist()
        assert random.tolist() == [[seed, first + n + 1, 5 + n + 1]] * 2
        if counts is not None and expected_counts is not None:
            expected_counts.scatter_add_(1, expected.clamp(min=0)[:, None], torch.ones_like(expected_counts[:, :1]))
            assert torch.equal(counts, expected_counts)


@pytest.mark.gpu
def test_choose_uses_the_kernel_and_follows_the_generator() -> None:
    logits = torch.randn(4, 205, device="cuda")
    settings = Sampling(top_p=0.9)
    first, second, other = (
        settings.choose(logits, torch.Generator("cuda").manual_seed(seed)).tolist() for seed in (1, 1, 2)
    )
    assert first == second
    assert max(first + other) < 205
    assert Sampling(temperature=0.0).choose(logits, torch.Generator("cuda")).tolist() == logits.argmax(-1).tolist()
