"""The LSTM layer with torch's kernel (cuDNN on CUDA), with document starts.

A CPU calls the kernel for every piece between two starts. In a batch of many rows some row starts a document at every
few tokens, and a GPU would be launch-bound. There the kernel is called once, with a further step before every start:
inputs that saturate its gates set h and c to exactly zero.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache.recurrent import LSTMCache
from longspan.kernels.untraced import untraced
from longspan.nn.recurrent import RecurrentLayer
from longspan.shapes import Bool, Float, Int, Tensor

LONGEST = 32_768
"""Steps per kernel call: cuDNN refuses 65,536, and shorter calls cost nothing at this length."""
MOST_PIECES = 3
"""With more pieces, a GPU inserts steps."""
SATURATED = 1e4
"""sigmoid(-SATURATED) is 0 and sigmoid(SATURATED) is 1, and the gates get no gradient, in every dtype."""
Piece = tuple[int, int, Bool[Tensor, "B"]]
"""First and one past the last position of a piece, and the rows in which it starts a document."""


class Inserted(NamedTuple):
    """A segment with further steps: one before every document start, and some at the end of rows with fewer starts."""

    token: Int[Tensor, "B S"]
    """The token of every step; any token for further steps, whose gates do not depend on it."""
    marks: Float[Tensor, "B S 8"]
    """Columns 0 and 1 mark steps that reset h and c, and steps that hold c. Eight, for products of aligned size."""
    step: Int[Tensor, "B T"]
    """The step of every token."""

    @classmethod
    def before(cls, starts: Bool[Tensor, "B T"], most: int) -> "Inserted":
        """`most` is the largest number of starts in a row."""
        T = starts.shape[1]
        position = torch.arange(T, device=starts.device).expand_as(starts)
        step = position + starts.cumsum(1)
        further = torch.full((len(starts), T + most), T, device=starts.device)
        token = further.scatter(1, step, position)
        hold = torch.arange(T + most, device=starts.device) > step[:, -1:]
        marks = F.pad(torch.stack([(token == T) & ~hold, hold], dim=-1), (0, 6))
        return cls(token.clamp(max=T - 1), marks.float(), step)

    def run(
        self, x: Float[Tensor, "B T E"], h: Float[Tensor, "B D"], c: Float[Tensor, "B D"], weights: list[Tensor]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B D"], Float[Tensor, "B D"]]:
        """The function of `lstm` over the segment."""
        W, U, *biases = weights
        steps = x.gather(1, self.token[..., None].expand(-1, -1, x.shape[2]))
        # Gates i, f, g, o: a reset closes i, f and o; a hold closes i and o and opens f.
        gates = W.new_zeros(4, U.shape[1], 8)
        gates[0, :, :2] = gates[3, :, :2] = gates[1, :, 0] = -SATURATED
        gates[1, :, 1] = SATURATED
        inputs = torch.cat([steps, self.marks.to(x.dtype)], dim=-1)
        output, _, c = lstm(inputs, h, c, [torch.cat([W, gates.flatten(0, 1)], dim=1), U, *biases])
        # In the memory layout of the kernel, because the order of dropout's draws follows it.
        step = self.step.t()[..., None].expand(-1, -1, output.shape[2])
        output = output.transpose(0, 1).gather(0, step).transpose(0, 1)
        return output, output[:, -1], c


class LSTMLayer(RecurrentLayer):
    """Hochreiter & Schmidhuber 1997 with forget gates (Gers et al. 2000), gates in torch's order:

        i, f, g, o = W x_t + b + U h_{t-1} + b'
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)        h_t = sigmoid(o) tanh(c_t)

    `weight_dropout` drops entries of U (DropConnect, Wan et al. 2013; Merity et al. 2017, section 2). One mask is used
    for all steps of a call, so the recurrence stays one kernel call.
    """

    Cache = LSTMCache
    inserts: ClassVar[bool | None] = None
    """Whether segments with many document starts get further steps. Default: on a GPU."""
    compiles = False  # cuDNN's kernel is opaque, so a compiled graph would break at every layer

    def __init__(self, inputs: int, units: int, weight_dropout: float = 0.0) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * units)  # W, b
        self.hidden = nn.Linear(units, 4 * units)  # U, b'
        self.weight_dropout = weight_dropout
        self.units = units

    def initial(self, batch: int, like: Tensor) -> LSTMCache:
        return LSTMCache(*(like.new_zeros(batch, self.units) for _ in range(2)))

    @staticmethod
    def prepare(starts: Bool[Tensor, "B T"]) -> list[Piece] | Inserted:
        """The segment is split where any row starts a document, or gets further steps. This needs one sync."""
        T, known = starts.shape[1], starts.cpu()
        edges = sorted({0, T, *known.any(dim=0).nonzero().flatten().tolist()})
        insert = starts.is_cuda if LSTMLayer.inserts is None else LSTMLayer.inserts
        if insert and len(edges) - 1 > MOST_PIECES:
            return Inserted.before(starts, int(known.sum(1).max()))
        return [(begin, end, starts[:, begin]) for begin, end in pairwise(edges)]

    def forward(
        self, x: Float[Tensor, "B T E"], cache: LSTMCache, starts: list[Piece] | Inserted | None
    ) -> tuple[Float[Tensor, "B T D"], LSTMCache]:
        U = F.dropout(self.hidden.weight, self.weight_dropout, self.training)
        weights = [self.input.weight, U, self.input.bias, self.hidden.bias]
        h, c = cache
        kernel = untraced(lstm)  # torch.compile would unroll it over the tokens of the segment
        if starts is None:
            output, h, c = kernel(x, h, c, weights)
        elif isinstance(starts, Inserted):
            output, h, c = untraced(starts.run)(x, h, c, weights)
        else:
            outputs = []
            for begin, end, new in starts:
                h, c = h.masked_fill(new[:, None], 0.0), c.masked_fill(new[:, None], 0.0)
                output, h, c = kernel(x[:, begin:end], h, c, weights)
                outputs.append(output)
            # In the memory layout of the kernel, because the order of dropout's draws follows it.
            output = torch.cat([piece.transpose(0, 1) for piece in outputs]).transpose(0, 1)
        dtype = self.input.weight.dtype  # a cache keeps its dtype under autocast
        return output, LSTMCache(h.to(dtype), c.to(dtype))


def lstm(
    x: Float[Tensor, "B T E"], h: Float[Tensor, "B D"], c: Float[Tensor, "B D"], weights: list[Tensor]
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B D"], Float[Tensor, "B D"]]:
    """One layer over a segment from h and c: all outputs, and h and c after the last token."""
    device = x.device.type
    # Autocast would always use float16 for an LSTM, so the dtype is set here.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
    outputs = []
    with torch.autocast(device, enabled=False):
        x, h, c, *weights = (tensor.to(dtype) for tensor in (x, h, c, *weights))
        for piece in x.split(LONGEST, dim=1):
            begin = h[None].contiguous(), c[None].contiguous()
            with _separate_weights(device):
                output, last_h, last_c = torch.lstm(
                    piece, begin, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True
                )
            outputs.append(output)
            h, c = last_h[0], last_c[0]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), h, c


@contextmanager
def _separate_weights(device: str) -> Iterator[None]:
    """Without cuDNN's warning about weights that are not in a single chunk: dropped weights are new in every call."""
    if device != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield
