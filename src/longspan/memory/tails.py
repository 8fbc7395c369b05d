"""What a short convolution reads of the segment before: per layer a tail, the last N inputs as they were before mixing.

    h'_t = h_t + sum_{j=1..N} c_j * h_{t-j}

A tail holds zeros where its row or its document had not begun, so it is read as it is.
"""

from typing import Any

import torch
from torch.nn import functional as F

from longspan.shapes import Bool, Float, Int, Tensor


def empty_tails(config: Any, like: Tensor, batch: int) -> dict[str, tuple[Tensor, ...]]:
    """The part of a state; without memory every segment begins anew, and a tail holds nothing."""
    if not config.convolution:
        return {}
    return {"tails": (like.new_zeros(batch, config.convolution if config.memory else 0, config.width),) * config.layers}


def seen_taps(first_key: Int[Tensor, "B T"] | None, remembered: int, taps: int) -> Bool[Tensor, "B T N"] | None:
    """Whether the position j = 1..N places back is one that a token may see; `first_key` is the oldest it may, counted
    from the first that is remembered."""
    if first_key is None or not taps:
        return None
    place = torch.arange(remembered, remembered + first_key.shape[1], device=first_key.device)
    return (place - first_key)[..., None] >= torch.arange(1, taps + 1, device=first_key.device)


def mix(
    convolution: Any, h: Float[Tensor, "B T E"], tail: Float[Tensor, "B S E"], seen: Bool[Tensor, "B T N"] | None
) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N E"]]:
    """A layer's input with what its convolution takes in, and the tail that it leaves, without gradient."""
    N, T = convolution.weight.shape[0], h.shape[1]
    before = F.pad(tail.to(h.dtype), (0, 0, N - tail.shape[1], 0))
    after = torch.cat([before[:, T:], h[:, -N:]], dim=1).detach()
    if seen is not None:
        # What the last token may see of the ones before it, the next one may; and the last token.
        begun = F.pad(seen[:, -1, :-1], (1, 0), value=True).flip(1)
        after = after.masked_fill(~begun[..., None], 0.0)
    return convolution(h, before, seen), after
