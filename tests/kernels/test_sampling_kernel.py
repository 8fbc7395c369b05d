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
