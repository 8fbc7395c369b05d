"""The LSTM layer with torch's kernel (cuDNN on CUDA), split at document starts."""

import warnings
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache.recurrent import LSTMCache
from longspan.kernels.untraced import untraced
from longspan.nn.recurrent import RecurrentLayer
from longspan.shapes import Bool, Float, Tensor

# Dropped weights are new tensors in every call, so they are never in the single chunk that cuDNN prefers.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

LONGEST = 32_768
"""Steps per kernel call: cuDNN refuses 65,536, and shorter calls cost nothing at this length."""
Piece = tuple[int, int, Bool[Tensor, "B"]]
"""First and one past the last position of a piece, and the rows in which it starts a document."""


class LSTMLayer(RecurrentLayer):
    """Hochreiter & Schmidhuber 1997 with forget gates (Gers et al. 2000), gates in torch's order:

        i, f, g, o = W x_t + b + U h_{t-1} + b'
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)        h_t = sigmoid(o) tanh(c_t)

    `weight_dropout` drops entries of U (DropConnect, Wan et al. 2013; Merity et al. 2017, section 2). One mask is used
    for all steps of a call, so the recurrence stays one kernel call.
    """

    Cache = LSTMCache
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
    def prepare(starts: Bool[Tensor, "B T"]) -> list[Piece]:
        """The segment is split where any row starts a document. Segments with a start need one sync."""
        T = starts.shape[1]
        edges = sorted({0, T, *starts.any(dim=0).nonzero().flatten().tolist()})
        return [(begin, end, starts[:, begin]) for begin, end in pairwise(edges)]

    def forward(
        self, x: Float[Tensor, "B T E"], cache: LSTMCache, starts: list[Piece] | None
    ) -> tuple[Float[Tensor, "B T D"], LSTMCache]:
        U = F.dropout(self.hidden.weight, self.weight_dropout, self.training)
        weights = [self.input.weight, U, self.input.bias, self.hidden.bias]
        h, c = cache
        kernel = untraced(lstm)  # torch.compile would unroll it over the tokens of the segment
        if starts is None:
            output, h, c = kernel(x, h, c, weights)
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
            output, last_h, last_c = torch.lstm(
                piece, begin, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True
            )
            outputs.append(output)
            h, c = last_h[0], last_c[0]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), h, c
