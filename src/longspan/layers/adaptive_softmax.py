"""Adaptive softmax (Grave et al. 2017) with optional ties to the embedding; a plain softmax where no cutoffs are set.

The head scores the frequent tokens and one entry per rarer cluster; a rare token's probability is its cluster's entry
times its share within the cluster. Clusters are numbered in the order of the cutoffs (the authors' PyTorch code counts
them from the other end; `checkpoints/convert.py` turns them round). Losses come back in the order of the tokens.
"""

import torch
from torch import nn
from torch.nn import functional as F

from longspan.contract import Head
from longspan.errors import DataError
from longspan.layers.embedding import AdaptiveEmbedding, cluster_edges
from longspan.shapes import Float, Int, Tensor

# No target is this number. The default of `cross_entropy` is -100, for which it gives a loss of 0; with this one every
# target outside of the vocabulary is an error: an IndexError on a CPU, a device assertion on a GPU.
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
        # The first cluster's projection is never tied: the authors' proj_share_all_but_first.
        self.projections = nn.ParameterList()
        if len(embedding.projections):
            for i in range(len(self.clusters)):
                shared = embedding.projections[min(i, len(embedding.projections) - 1)]
                self.projections.append(shared if tie_projections and i > 0 else torch.empty_like(shared))
        if cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), embedding.tables[0].shape[1]))
            self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))

    def _scores(self, hidden: Float[Tensor, "... D"], cluster: int) -> Float[Tensor, "... E"]:
        """Scores of a cluster's tokens, over the temperature; cluster 0 has the entries of the others behind its own.

        In float32 or wider, whatever they are computed in: probabilities come of them."""
        begin, end = self.clusters[cluster]
        whole = len(self.tables) < len(self.clusters)
        table = self.tables[0][begin:end] if whole else self.tables[cluster]
        bias = self.biases[0][begin:end] if whole else self.biases[cluster]
        if cluster == 0 and len(self.clusters) > 1:
            table, bias = torch.cat([table, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        if len(self.projections):
            hidden = F.linear(hidden, self.projections[cluster].t())
        scores = F.linear(hidden, table, bias)
        wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        return wide if self.temperature == 1 else wide / self.temperature

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Scores of every token; with clusters, log-probabilities (which are scores too), in float32."""
        head = self._scores(hidden, 0)
        if len(self.clusters) == 1:
            return head
        head = head.log_softmax(-1)
        frequent = self.clusters[0][1]
        tails = [
            head[..., frequent + i - 1, None] + self._scores(hidden, i).log_softmax(-1)
            for i in range(1, len(self.clusters))
        ]
        return torch.cat([head[..., :frequent], *tails], dim=-1)

    def losses(self, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Negative log-probability of each target in nats, in the order of the tokens; at least float32."""
        self._require_known(targets)
        head = self._scores(hidden, 0)
        if len(self.clusters) == 1:
            return _cross_entropy(head.flatten(0, 1), targets.flatten()).view(targets.shape)
        frequent = self.clusters[0][1]
        entry = targets
        for i, (begin, end) in enumerate(self.clusters[1:]):
            entry = torch.where((targets >= begin) & (targets < end), frequent + i, entry)
        losses = _cross_entropy(head.flatten(0, 1), entry.flatten()).view(targets.shape)
        for i, (begin, end) in enumerate(self.clusters[1:], start=1):
            here = (targets >= begin) & (targets < end)
            tail = _cross_entropy(self._scores(hidden[here], i), targets[here] - begin)
            losses = losses + torch.zeros_like(losses).masked_scatter(here, tail)
        return losses

    def _require_known(self, targets: Int[Tensor, "B T"]) -> None:
        """On a CPU, in a sentence. A GPU would have to be waited for, and a compiled step cannot look: there the kernel
        itself refuses."""
        if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
            least, most = (int(edge) for edge in targets.aminmax())
            if least < 0 or most >= self.vocabulary:
                raise DataError(f"targets hold {least} to {most}; this model knows tokens 0 to {self.vocabulary - 1}")


def _cross_entropy(scores: Float[Tensor, "N E"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    return F.cross_entropy(scores, targets, reduction="none", ignore_index=IGNORED)
