"""Dropout of attention weights that depends on row, head, query and key, and not on how blocks are laid out.

The layout of a pattern follows the documents of all rows of a batch. A mask drawn in the order of a tensor would
therefore change with the other rows, and a run with the number of its processes.
"""

import torch
from torch.nn import functional as F

from longspan.shapes import Float, Int, Tensor

_BITS = 60
_LEVELS = 1 << 24


class PairDropout:
    """`F.dropout` for the weights of one call, which may compute them in several parts.

    On a GPU the mask is drawn in the order of the tensor: that is faster, and processes draw their own masks anyway.
    """

    def __init__(self, rate: float, inputs: Float[Tensor, "B H ..."]) -> None:
        self.rate, self.keys = rate, None
        if rate and not inputs.is_cuda:
            head = torch.arange(inputs.shape[1])
            self.keys = _mixed(_row_keys(inputs)[:, None] + head)

    def __call__(
        self, weights: Float[Tensor, "B H *N"], query: Int[Tensor, "..."], key: Int[Tensor, "..."]
    ) -> Float[Tensor, "B H *N"]:
        """The weights of queries and keys at these positions, whose shapes broadcast with that of the weights."""
        if self.keys is None:
            return F.dropout(weights, self.rate) if self.rate else weights
        of_query = _mixed(self.keys.view(*self.keys.shape, *[1] * (weights.dim() - 2)) + query)
        kept = (_mixed(of_query + key) & (_LEVELS - 1)) >= int(self.rate * _LEVELS)
        return weights * kept / (1 - self.rate)


def _row_keys(inputs: Float[Tensor, "B ..."]) -> Int[Tensor, "B"]:
    """A random number per row. Its bits are those of a dropout, of which processes that divide a batch draw all rows
    and use their own (`nn/whole_batch.py`)."""
    bits = F.dropout(inputs.new_ones(inputs.shape[0], _BITS, 1), 0.5) > 0
    return (bits[:, :, 0].long() << torch.arange(_BITS)).sum(1)


def _mixed(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The finaliser of SplitMix64 (Steele et al. 2014) after one step of its counter; int64 products wrap around."""
    x = x * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)
