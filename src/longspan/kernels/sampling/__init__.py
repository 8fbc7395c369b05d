"""Sampling of the next token in one kernel: penalties, temperature, top-k, top-p and min-p.

The definition is `longspan.decoding.sampling.Sampling`, which takes a dozen launches. A token is drawn by inversion of
the cumulative distribution, with one uniform number per row. The kernel can compute these numbers itself (Philox).
"""

from typing import NamedTuple

import torch

from longspan.kernels.relative_attention import TRITON_WORKS
from longspan.shapes import Float, Int, Tensor

WIDEST = 4096
"""A program holds, and may sort, a complete row."""
LEAST_TEMPERATURE = 1e-30
"""Smaller ones are greedy in float64 as well."""


class Places(NamedTuple):
    """Fixed places on the device for a step in a CUDA graph, where every step finds what the one before it left."""

    tokens: Int[Tensor, "B"]
    """The tokens that were sampled, which the next step reads."""
    random: Int[Tensor, "B 3"]
    """Per row: the seed, the number of its next draw, and the number of the step."""
    found: Int[Tensor, "2 B"] | None = None
    """The tokens of even and odd steps. The host can read those of a step while the next one is computed. If given,
    only this has the -1 of a row that is not finite, and `tokens` has a 0."""


def supports(logits: Float[Tensor, "B V"]) -> bool:
    return logits.stride(1) == 1 and supports_size(logits.device, logits.shape[1])


def supports_size(device: torch.device, vocabulary: int) -> bool:
    return device.type == "cuda" and TRITON_WORKS and vocabulary <= WIDEST


def choose_tokens(
    logits: Float[Tensor, "B V"],
    uniform: Float[Tensor, "B"] | None = None,
    *,
    places: Places | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    counts: Float[Tensor, "B V"] | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Int[Tensor, "B"]:
    """The next token of every row, or -1 where the largest logit is not finite.

    `uniform` are float64 numbers below 1; without them, the kernel draws them from `places.random`; without both it is
    greedy. With `places`, the tokens are stored there and counted in `counts`.
    """
    from longspan.kernels.sampling.kernel import GIVEN, NONE, PHILOX, choose_kernel

    B, V = logits.shape
    chosen = torch.empty(B, dtype=torch.int64, device=logits.device) if places is None else places.tokens
    kept = top_k if 0 < top_k < V else V
    counts = None if counts is None else counts.contiguous()
    greedy = temperature == 0 or top_k == 1 or (uniform is None and places is None)
    source = NONE if greedy else PHILOX if uniform is None else GIVEN
    found = None if places is None else places.found
    choose_kernel[(B,)](
        logits, uniform, counts, chosen, None if places is None else places.random, found, logits.stride(0), V, B,
        max(temperature, LEAST_TEMPERATURE), kept, top_p, min_p, presence_penalty, frequency_penalty,
        repetition_penalty, BV=max(16, 1 << (V - 1).bit_length()), RANDOM=source.value,
        ORDERED=not greedy and (kept < V or top_p < 1), COUNTS=counts is not None, PLACES=places is not None,
        FOUND=found is not None, num_warps=4 if V <= 1024 else 8,
    )  # fmt: skip
    return chosen
