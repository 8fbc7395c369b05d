"""Compression functions of Rae et al. 2019 (section 3.2), and the loss that trains one (algorithm 2).

Each makes count / rate slots of the `count` oldest positions of a memory.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.nn import functional as F

from longspan.layers.attention import Attention, split_heads
from longspan.layers.transformer import Residual
from longspan.shapes import Bool, Float, Int, Tensor


class Compression(nn.Module, ABC):
    """rate positions in, one slot out."""

    chooses = False
    """Whether slots are positions chosen by how much they were attended to; the rest are made of whole blocks."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.width, self.rate = width, rate

    @abstractmethod
    def forward(
        self, memory: Float[Tensor, "B N D"], count: int, usage: Float[Tensor, "B O"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Slots of the first `count` positions; `usage` is the attention each of them had, where it is asked for."""


class MeanPooling(Compression):
    def forward(
        self,
        memory: Float[Tensor, "B N D"],
        count: int,
        usage: Float[Tensor, "B O"] | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "B S D"]:
        return memory[:, :count].unflatten(1, (-1, self.rate)).mean(dim=2)


class MaxPooling(Compression):
    def forward(
        self,
        memory: Float[Tensor, "B N D"],
        count: int,
        usage: Float[Tensor, "B O"] | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "B S D"]:
        return memory[:, :count].unflatten(1, (-1, self.rate)).amax(dim=2)


class Convolution(Compression):
    """A 1D convolution whose kernel and stride are the rate; it begins as the mean of its block.

    Dilated, its taps lie `dilation` apart and reach into newer positions (never older ones: those may be another
    document's); beyond the last there are zeros. The paper names no dilation; ours is 2.
    """

    def __init__(self, width: int, rate: int, dilation: int = 1) -> None:
        super().__init__(width, rate)
        self.convolution = nn.Conv1d(width, width, rate, stride=rate, dilation=dilation)
        self.ahead = (rate - 1) * (dilation - 1)

    @torch.no_grad()
    def begin_as_mean(self) -> None:
        self.convolution.weight.diagonal().add_(1 / self.rate)  # of the first two dimensions: every unit to itself

    def forward(
        self,
        memory: Float[Tensor, "B N D"],
        count: int,
        usage: Float[Tensor, "B O"] | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "B S D"]:
        read = memory[:, : count + self.ahead].transpose(1, 2)
        return self.convolution(F.pad(read, (0, count + self.ahead - read.shape[2]))).transpose(1, 2)


class DilatedConvolution(Convolution):
    def __init__(self, width: int, rate: int) -> None:
        super().__init__(width, rate, dilation=2)


class MostUsed(Compression):
    """The positions that were attended to most, in the order of the text; nothing is mixed."""

    chooses = True

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
    """mean | attend(h, old) - attend(h, slots) |^2 with attend(h, m) = softmax(h Wq (m Wk)^T / sqrt(D)) m Wv, queries
    and keys under the attention's norms where it has them.

    Everything but `slots` is held fixed, the projections too: its gradient reaches what made the slots and nothing
    else. `valid` slots at the end of each row count; a row without any is left out.
    """
    rate = old.shape[1] // slots.shape[1]

    def frozen(linear: nn.Linear, norm: nn.Module, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B H T D"]:
        x = F.linear(_frozen(residual.norm, x) if residual.before else x, linear.weight.detach())
        return split_heads(_frozen(norm, x), attention.heads)

    def attend(memory: Float[Tensor, "B T E"], last: Int[Tensor, "B"]) -> Float[Tensor, "B H L D"]:
        seen = _last(last, memory.shape[1])[:, None, None]
        keys = frozen(attention.key, attention.key_norm, memory)
        values = frozen(attention.value, nn.Identity(), memory)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)

    query = frozen(attention.query, attention.query_norm, h.detach())
    there = valid > 0
    last = torch.where(there, valid, slots.shape[1])  # a softmax over nothing has no value
    wrong = (attend(old.detach(), last * rate) - attend(slots, last)).square().mean(dim=(1, 2, 3))
    return torch.where(there, wrong, 0.0).sum() / there.sum().clamp(min=1)


def _last(count: Int[Tensor, "B"], size: int) -> Bool[Tensor, "B S"]:
    return torch.arange(size, device=count.device) >= size - count[:, None]


def _frozen(norm: nn.Module, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
    if isinstance(norm, nn.Identity):
        return x
    frozen = {name: parameter.detach() for name, parameter in norm.named_parameters()}
    return torch.func.functional_call(norm, frozen, (x,))
