"""Sampling of the next token in one kernel: penalties, temperature, top-k, top-p and min-p.

The definition is `longspan.decoding.sampling.Sampling`, which takes a dozen launches. A token is drawn by inversion of
the cumulative distribution, with one uniform number per row.
"""

import torch

from longspan.kernels.relative_attention import TRITON_WORKS
from longspan.shapes import Float, Int, Tensor

WIDEST = 4096
"""A program holds, and may sort, a complete row."""
LEAST_TEMPERATURE = 1e-30
"""Smaller ones are greedy in float64 as well."""


def supports(logits: Float[Tensor, "B V"]) -> bool:
    return logits.is_cuda and TRITON_WORKS and logits.shape[1] <= WIDEST and logits.stride(1) == 1


def choose_tokens(
    logits: Float[Tensor, "B V"],
    uniform: Float[Tensor, "B"] | None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    counts: Float[Tensor, "B V"] | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Int[Tensor, "B"]:
    """The next token of every row, or -1 where the largest logit is not finite. Greedy without `uniform`, which are
    float64 numbers below 1."""
    from longspan.kernels.sampling.kernel import choose_kernel

    B, V = logits.shape
    chosen = torch.empty(B, dtype=torch.int64, device=logits.device)
    kept = top_k if 0 < top_k < V else V
    counts = None if counts is None else counts.contiguous()
    choose_kernel[(B,)](
        logits, uniform, counts, chosen, logits.stride(0), V, max(temperature, LEAST_TEMPERATURE), kept, top_p, min_p,
        presence_penalty, frequency_penalty, repetition_penalty,
        BV=max(16, 1 << (V - 1).bit_length()), GREEDY=uniform is None, ORDERED=kept < V or top_p < 1,
        COUNTS=counts is not None, num_warps=4 if V <= 1024 else 8,
    )  # fmt: skip
    return chosen
