"""Adaptive token embedding (Baevski & Auli 2019): wide vectors for frequent tokens, narrow ones for rare tokens."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from longspan.shapes import Float, Int, Tensor


def cluster_edges(vocabulary: int, cutoffs: tuple[int, ...]) -> list[tuple[int, int]]:
    """First token id and one past the last of each cluster."""
    edges = [0, *cutoffs, vocabulary]
    return list(pairwise(edges))


class AdaptiveEmbedding(nn.Module):
    """Vectors of width `embedding_width // div_val**i` for cluster i, projected to the width of the model. If `scaled`,
    as in Transformers, they are multiplied by its square root.

    With div_val = 1 there is one table, with a projection if the widths differ. With div_val > 1 there is one table and
    one projection per cluster, the first included. This is the authors' layout, so weights convert one to one.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        embedding_width: int,
        cutoffs: tuple[int, ...] = (),
        div_val: int = 1,
        *,
        scaled: bool = True,
    ) -> None:
        super().__init__()
        self.width, self.scale = width, width**0.5 if scaled else 1.0
        self.edges = cluster_edges(vocabulary, cutoffs) if div_val > 1 else [(0, vocabulary)]
        widths = [embedding_width // div_val**i for i in range(len(self.edges))]
        self.tables = nn.ParameterList(
            torch.empty(end - begin, w) for (begin, end), w in zip(self.edges, widths, strict=True)
        )
        projected = div_val > 1 or embedding_width != width
        self.projections = nn.ParameterList(torch.empty(width, w) for w in widths if projected)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        if len(self.edges) == 1:
            rows = F.embedding(tokens, self.tables[0])
            return (F.linear(rows, self.projections[0]) if len(self.projections) else rows) * self.scale
        # Every cluster looks up every token and keeps its own. This is a little more arithmetic, but needs no sync for
        # the number of tokens per cluster.
        embedded = torch.zeros((), dtype=self.tables[0].dtype, device=tokens.device)
        for (begin, end), table, projection in zip(self.edges, self.tables, self.projections, strict=True):
            here = (tokens >= begin) & (tokens < end)
            rows = F.embedding((tokens - begin).clamp(0, end - begin - 1), table)
            embedded = torch.where(here[..., None], F.linear(rows, projection), embedded)
        return embedded * self.scale
