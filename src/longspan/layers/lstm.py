"""The LSTM layer, by torch's own kernel (cuDNN's on CUDA), cut where documents begin."""

import warnings
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from longspan.kernels.untraced import untraced
from longspan.layers.recurrent import RecurrentLayer
from longspan.shapes import Bool, Float, Tensor

# Weights that are dropped anew at every step never lie in the one chunk of memory cuDNN would like.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

LONGEST = 32_768
"""Steps in one call: cuDNN refuses 65,536, and a shorter call costs nothing there."""
Begin = tuple[int, int, Bool[Tensor, "B"]]
"""First and one past the last position of a stretch, and the rows in which it begins a document."""


class LSTMLayer(RecurrentLayer):
    """Hochreiter & Schmidhuber 1997 with forget gates (Gers et al. 2000), gates in torch's order:

        i, f, g, o = W x_t + b + U h_{t-1} + b'
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)        h_t = sigmoid(o) tanh(c_t)

    `weight_dropout` drops entries of U, one draw per call (DropConnect, Wan et al. 2013; Merity et al. 2017, section
    2): the same for all steps of the segment, so the recurrence stays one call of the kernel.
    """

    parts = ("h", "c")
    worth_compiling = False  # the kernel is opaque: a compiler would cut its graph at every layer

    def __init__(self, inputs: int, units: int, weight_dropout: float = 0.0) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * units)  # W, b
        self.hidden = nn.Linear(units, 4 * units)  # U, b'
        self.weight_dropout = weight_dropout
        self.carried = (units, units)

    @staticmethod
    def boundaries(starts: Bool[Tensor, "B T"]) -> list[Begin]:
        """Where any row begins a document the segment is cut: asks the device once, for segments that hold a start."""
        T = starts.shape[1]
        edges = sorted({0, T, *starts.any(dim=0).nonzero().flatten().tolist()})
        return [(begin, end, starts[:, begin]) for begin, end in pairwise(edges)]

    def forward(
        self, x: Float[Tensor, "B T E"], carried: tuple[Tensor, ...], boundaries: list[Begin] | None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Tensor, ...]]:
        U = F.dropout(self.hidden.weight, self.weight_dropout, self.training)
        weights = [self.input.weight, U, self.input.bias, self.hidden.bias]
        h, c = carried
        read = untraced(lstm)  # a compiler would unroll it into as many steps as the segment has tokens
        if boundaries is None:
            output, h, c = read(x, h, c, weights)
        else:
            outputs = []
            for begin, end, fresh in boundaries:
                h, c = h.masked_fill(fresh[:, None], 0.0), c.masked_fill(fresh[:, None], 0.0)
                output, h, c = read(x[:, begin:end], h, c, weights)
                outputs.append(output)
            output = torch.cat(outputs, dim=1)
        kind = self.input.weight.dtype  # a state keeps its dtype, whatever autocast computes in
        return output, (h.to(kind), c.to(kind))


def lstm(
    x: Float[Tensor, "B T E"], h: Float[Tensor, "B D"], c: Float[Tensor, "B D"], weights: list[Tensor]
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B D"], Float[Tensor, "B D"]]:
    """One layer over a segment from h and c; gives all outputs, and h and c after the last."""
    device = x.device.type
    # Autocast has its own idea of what a recurrence is computed in (half, whatever was asked for): it is told here.
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
    outputs = []
    with torch.autocast(device, enabled=False):
        x, h, c, *weights = (tensor.to(kind) for tensor in (x, h, c, *weights))
        for piece in x.split(LONGEST, dim=1):
            begin = h[None].contiguous(), c[None].contiguous()
            output, last_h, last_c = torch.lstm(
                piece, begin, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True
            )
            outputs.append(output)
            h, c = last_h[0], last_c[0]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), h, c
