"""Compression functions of Rae et al. 2019 (section 3.2), and the loss that trains one (algorithm 2).

Each one computes count / rate slots from the `count` oldest positions of a memory.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.nn import functional as F

from longspan.nn.attention import Attention, split_heads
from longspan.nn.transformer import Residual
from longspan.nn.whole_batch import mean_of_marked
from longspan.shapes import Bool, Float, Int, Tensor


class Compression(nn.Module, ABC):
    """Compresses `rate` positions to one slot."""

    selects = False
    """Whether slots are single positions, selected by attention; other functions combine complete blocks."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.width, self.rate = width, rate

    @abstractmethod
    def forward(
        self, memory: Float[Tensor, "B N D"], count: int, usage: Float[Tensor, "B O"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Slots of the first `count` positions; `usage` is the attention that each got, for functions that select."""


class Pooling(Compression):
    """Slots are the mean or the maximum of complete blocks."""

    def forward(
        self,
        memory: Float[Tensor, "B N D"],
        count: int,
        usage: Float[Tensor, "B O"] | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "B S D"]:
        return self.pool(memory[:, :count].unflatten(1, (-1, self.rate)))

    @abstractmethod
    def pool(self, blocks: Float[Tensor, "B S R D"]) -> Float[Tensor, "B S D"]: ...


class MeanPooling(Pooling):
    def pool(self, blocks: Float[Tensor, "B S R D"]) -> Float[Tensor, "B S D"]:
        return blocks.mean(dim=2)


class MaxPooling(Pooling):
    def pool(self, blocks: Float[Tensor, "B S R D"]) -> Float[Tensor, "B S D"]:
        return blocks.amax(dim=2)


class Convolution(Compression):
    """A 1D convolution with the rate as kernel size and stride, initialised as the mean of its block.

    With `dilation`, its taps are that far apart and reach into newer positions (not older ones, which may belong to
    another document), with zeros after the last. The paper does not give a dilation; ours is 2.
    """

    def __init__(self, width: int, rate: int, dilation: int = 1) -> None:
        super().__init__(width, rate)
        self.convolution = nn.Conv1d(width, width, rate, stride=rate, dilation=dilation)
        self.ahead = (rate - 1) * (dilation - 1)

    @torch.no_grad()
    def initialise_as_mean(self) -> None:
        self.convolution.weight.diagonal().add_(
            1 / self.rate
        )  # the diagonal of the first two axes: every unit to itself

    def forward(
        self,
        memory: Float[Tensor, "B N D"],
        count: int,
        usage: Float[Tensor, "B O"] | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "B S D"]:
        used = memory[:, : count + self.ahead].transpose(1, 2)
        return self.convolution(F.pad(used, (0, count + self.ahead - used.shape[2]))).transpose(1, 2)


class DilatedConvolution(Convolution):
    def __init__(self, width: int, rate: int) -> None:
        super().__init__(width, rate, dilation=2)


class MostUsed(Compression):
    """The positions that got most attention, in text order and unchanged."""

    selects = True

    def forward(
        self, memory: Float[Tensor, "B N D"], count: int, usage: Float[Tensor, "B O"] | None = None
    ) -> Float[Tensor, "B S D"]:
        assert usage is not None
        best = usage.topk(count // self.rate, dim=1).indices.sort(dim=1).values
        return memory[:, :count].gather(1, best[:, :, None].expand(-1, -1, memory.shape[2]))


COMPRESSIONS: dict[str, type[Compression]] = {
    "mean": MeanPooling,
    "max": MaxPooling,
    "convolution": Convolution,
    "dilated": DilatedConvolution,
    "most-used": MostUsed,
}


def reconstruction_loss(
    attention: Attention,
    residual: Residual,
    h: Float[Tensor, "B L E"],
    old: Float[Tensor, "B O E"],
    slots: Float[Tensor, "B S E"],
    valid: Int[Tensor, "B"],
) -> Float[Tensor, ""]:
    """mean | attend(h, old) - attend(h, slots) |^2 with attend(h, m) = softmax(h Wq (m Wk)^T / sqrt(D)) m Wv; queries
    and keys are normed if the attention has norms.

    Everything except `slots` is detached, the projections included, so gradients reach only the compression function.
    Only the last `valid` slots of each row count; rows without valid slots are ignored.
    """
    rate = old.shape[1] // slots.shape[1]

    def projected(linear: nn.Linear, norm: nn.Module, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B H T D"]:
        x = F.linear(_detached(residual.norm, x) if residual.pre_norm else x, linear.weight.detach())
        return split_heads(_detached(norm, x), attention.heads)

    def attend(memory: Float[Tensor, "B T E"], last: Int[Tensor, "B"]) -> Float[Tensor, "B H L D"]:
        visible = _last(last, memory.shape[1])[:, None, None]
        keys = projected(attention.key, attention.key_norm, memory)
        values = projected(attention.value, nn.Identity(), memory)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)

    query = projected(attention.query, attention.query_norm, h.detach())
    has_slots = valid > 0
    last = torch.where(has_slots, valid, slots.shape[1])  # a softmax without keys would be NaN
    errors = (attend(old.detach(), last * rate) - attend(slots, last)).square().mean(dim=(1, 2, 3))
    return mean_of_marked(torch.where(has_slots, errors, 0.0).sum(), has_slots)


def _last(count: Int[Tensor, "B"], size: int) -> Bool[Tensor, "B S"]:
    return torch.arange(size, device=count.device) >= size - count[:, None]


def _detached(norm: nn.Module, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
    if isinstance(norm, nn.Identity):
        return x
    weights = {name: parameter.detach() for name, parameter in norm.named_parameters()}
    return torch.func.functional_call(norm, weights, (x,))
