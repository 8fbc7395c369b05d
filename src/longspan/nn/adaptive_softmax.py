"""Adaptive softmax (Grave et al. 2017), optionally tied to the embedding; without cutoffs a plain softmax.

The first softmax is over the frequent tokens and one entry per further cluster. The probability of a rare token is that
of its cluster times that of the token in the cluster. Clusters are numbered in the order of the cutoffs (the authors'
PyTorch code numbers them in reverse; `interop/` converts them). Losses are in token order.
"""

import torch
from torch import nn
from torch.nn import functional as F

from longspan.contract import Head
from longspan.errors import DataError
from longspan.nn.embedding import AdaptiveEmbedding, cluster_edges
from longspan.shapes import Float, Int, Tensor

# No target has this value. By default `cross_entropy` gives a target of -100 a loss of 0. With this value, every target
# outside the vocabulary is an error: an IndexError on a CPU, a device assertion on a GPU.
IGNORED = -(2**40)


class AdaptiveSoftmax(Head):
    def __init__(
        self,
        embedding: AdaptiveEmbedding,
        vocabulary: int,
        cutoffs: tuple[int, ...] = (),
        *,
        tie_embedding: bool = True,
        tie_projections: bool = False,
    ) -> None:
        super().__init__()
        self.clusters = cluster_edges(vocabulary, cutoffs)
        self.vocabulary = vocabulary
        self.tables = nn.ParameterList(
            table if tie_embedding else torch.empty_like(table) for table in embedding.tables
        )
        self.biases = nn.ParameterList(torch.zeros(table.shape[0]) for table in embedding.tables)
        # The projection of the first cluster is never tied: the authors' proj_share_all_but_first.
        self.projections = nn.ParameterList()
        if len(embedding.projections):
            for i in range(len(self.clusters)):
                shared = embedding.projections[min(i, len(embedding.projections) - 1)]
                self.projections.append(shared if tie_projections and i > 0 else torch.empty_like(shared))
        if cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), embedding.tables[0].shape[1]))
            self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))

    def _scores(self, hidden: Float[Tensor, "... D"], cluster: int, temperature: float) -> Float[Tensor, "... E"]:
        """Scores of the tokens of a cluster divided by the temperature; after those of cluster 0 come the entries of
        the other clusters. In float32 or wider, because probabilities are computed from them."""
        begin, end = self.clusters[cluster]
        one_table = len(self.tables) < len(self.clusters)
        table = self.tables[0][begin:end] if one_table else self.tables[cluster]
        bias = self.biases[0][begin:end] if one_table else self.biases[cluster]
        if cluster == 0 and len(self.clusters) > 1:
            table, bias = torch.cat([table, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        if len(self.projections):
            hidden = F.linear(hidden, self.projections[cluster].t())
        scores = F.linear(hidden, table, bias)
        wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        return wide if temperature == 1 else wide / temperature

    def logits(self, hidden: Float[Tensor, "B T D"], temperature: float = 1.0) -> Float[Tensor, "B T V"]:
        """Scores of every token, at least float32; with clusters they are log-probabilities."""
        head = self._scores(hidden, 0, temperature)
        if len(self.clusters) == 1:
            return head
        head = head.log_softmax(-1)
        frequent = self.clusters[0][1]
        tails = [
            head[..., frequent + i - 1, None] + self._scores(hidden, i, temperature).log_softmax(-1)
            for i in range(1, len(self.clusters))
        ]
        return torch.cat([head[..., :frequent], *tails], dim=-1)

    def losses(
        self, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"], temperature: float = 1.0
    ) -> Float[Tensor, "B T"]:
        """Negative log-probability of each target in nats, in token order; at least float32."""
        self._check_targets(targets)
        head = self._scores(hidden, 0, temperature)
        if len(self.clusters) == 1:
            return _cross_entropy(head.flatten(0, 1), targets.flatten()).view(targets.shape)
        frequent = self.clusters[0][1]
        entry = targets
        for i, (begin, end) in enumerate(self.clusters[1:]):
            entry = torch.where((targets >= begin) & (targets < end), frequent + i, entry)
        losses = _cross_entropy(head.flatten(0, 1), entry.flatten()).view(targets.shape)
        for i, (begin, end) in enumerate(self.clusters[1:], start=1):
            here = (targets >= begin) & (targets < end)
            tail = _cross_entropy(self._scores(hidden[here], i, temperature), targets[here] - begin)
            losses = losses + torch.zeros_like(losses).masked_scatter(here, tail)
        return losses

    def _check_targets(self, targets: Int[Tensor, "B T"]) -> None:
        """A readable error on a CPU. On a GPU the check would need a sync, and compiled code cannot branch on values;
        there `cross_entropy` itself fails."""
        if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
            least, most = (int(edge) for edge in targets.aminmax())
            if least < 0 or most >= self.vocabulary:
                raise DataError(
                    f"targets are between {least} and {most}; tokens of this model are 0 to {self.vocabulary - 1}"
                )


def _cross_entropy(scores: Float[Tensor, "N E"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    return F.cross_entropy(scores, targets, reduction="none", ignore_index=IGNORED)
