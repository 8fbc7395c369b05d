"""Relative attention against the same attention without the position term (FlexAttention on CUDA).

Operations counted are the matrix products of an exact method on the unmasked pairs: two forward and five backward for
plain attention, three and eight with the position term.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from longspan.cuda_graphs import capture, warm_up
from longspan.experiments.bench.timing import Line, Preset, seconds
from longspan.kernels.causal_attention import block_mask, causal_attention
from longspan.kernels.relative_attention import relative_attention
from longspan.shapes import Tensor

FORWARD, BOTH, CAPTURED = "forward", "forward and backward", "forward and backward in a CUDA graph"
PRODUCTS = {FORWARD: (3, 2), BOTH: (11, 7), CAPTURED: (11, 7)}


def measure(preset: Preset, device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    """One line per memory length and direction, on CUDA also captured as in training. L is the training segment of the
    preset."""
    H = preset.model["heads"]
    D, L = preset.model["width"] // H, preset.train[1]
    for M, B in preset.attention:
        torch.manual_seed(0)

        def heads(length: int, B: int = B) -> Tensor:
            """The memory layout of a projection: heads side by side."""
            return torch.randn(B, length, H, D, device=device, dtype=dtype).transpose(1, 2)

        tensors = [
            heads(L),
            heads(M + L),
            heads(M + L),
            *torch.randn(H, M + L + 2, D, device=device, dtype=dtype).split([M + L, 1, 1], 1),
        ]
        tensors[4:] = [bias[:, 0] for bias in tensors[4:]]
        ours, theirs = _times(relative_attention, tensors, device), _times(_rival(tensors), tensors[:3], device)
        product = 2e-12 * D * B * H * (L * M + L * (L + 1) / 2)
        extra = _extra_memory(tensors) if device.type == "cuda" else None
        for direction in ours:
            our_products, their_products = PRODUCTS[direction]
            yield Line(
                f"{direction}, memory {M}, batch {B}",
                "without the position term",
                "calls/s",
                1 / ours[direction],
                1 / theirs[direction],
                our_products * product / ours[direction],
                their_products * product / theirs[direction],
                their_products / our_products,
                extra,
            )


def _rival(tensors: list[Tensor], window: int | None = None) -> Callable[..., Tensor]:
    """FlexAttention with a block mask that is built once, its fastest use; on a CPU, SDPA."""
    if not tensors[0].is_cuda:
        return lambda *some: causal_attention(*some, window=window)
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, dynamic=False)
    mask = block_mask(tensors[0], tensors[1].shape[2], window, None)
    return lambda query, key, value: flex(query, key, value, block_mask=mask)


def _times(attention: Callable[..., Tensor], tensors: list[Tensor], device: torch.device) -> dict[str, float]:
    grad = torch.randn_like(tensors[0])
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def forward() -> Any:
        with torch.no_grad():
            return attention(*tensors)

    def both() -> Any:
        return torch.autograd.grad(attention(*leaves), leaves, grad)

    found = {FORWARD: seconds(forward, device), BOTH: seconds(both, device)}
    if device.type == "cuda":
        warm_up(both)
        found[CAPTURED] = seconds(capture(both).replay, device)
    return found


def _extra_memory(tensors: list[Tensor]) -> float:
    """Peak bytes of forward and backward beyond inputs, outputs and gradients, over those of [B, H, L, K] scores."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    grad = torch.randn_like(tensors[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = relative_attention(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    kept = sum(t.numel() * t.element_size() for t in (out, *grads))
    scores = leaves[0].numel() // leaves[0].shape[3] * leaves[1].shape[2] * leaves[0].element_size()
    return (torch.cuda.max_memory_allocated() - before - kept) / scores
