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
from longspan.kernels.cluster_losses import chunked_losses, cluster_losses
from longspan.kernels.triton_works import TRITON_WORKS
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
        self.static: bool | None = None
        """Whether shapes of `losses` are independent of the targets. Default: on a GPU."""
        self.chunked = False
        """Whether a softmax without cutoffs is computed in chunks of tokens where shapes are static. For models that
        are not compiled: they would write the logits of all tokens several times."""
        self.tables = nn.ParameterList(
            table if tie_embedding else table.new_empty(table.shape) for table in embedding.tables
        )
        self.biases = nn.ParameterList(torch.zeros(table.shape[0]) for table in embedding.tables)
        # The projection of the first cluster is never tied: the authors' proj_share_all_but_first.
        self.projections = nn.ParameterList()
        if len(embedding.projections):
            for i in range(len(self.clusters)):
                shared = embedding.projections[min(i, len(embedding.projections) - 1)]
                self.projections.append(shared if tie_projections and i > 0 else shared.new_empty(shared.shape))
        if cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), embedding.tables[0].shape[1]))
            self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))

    def transform(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """What every softmax reads, of the last hidden states. Here: the states themselves."""
        return hidden

    def _scores(self, hidden: Float[Tensor, "... D"], cluster: int, temperature: float) -> Float[Tensor, "... E"]:
        """Scores of the tokens of a cluster divided by the temperature; after those of cluster 0 come the entries of
        the other clusters. In float32 or wider, because probabilities are computed from them."""
        table, bias = self._table(cluster)
        scores = F.linear(self._project(hidden, cluster), table, bias)
        wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        return wide if temperature == 1 else wide / temperature

    def _table(self, cluster: int) -> tuple[Float[Tensor, "V D"], Float[Tensor, "V"]]:
        """Vectors and biases of the tokens of a cluster; those of cluster 0 end with the entries of the others."""
        begin, end = self.clusters[cluster]
        one_table = len(self.tables) < len(self.clusters)
        table = self.tables[0][begin:end] if one_table else self.tables[cluster]
        bias = self.biases[0][begin:end] if one_table else self.biases[cluster]
        if cluster == 0 and len(self.clusters) > 1:
            return torch.cat([table, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return table, bias

    def _project(self, hidden: Float[Tensor, "... E"], cluster: int) -> Float[Tensor, "... D"]:
        return F.linear(hidden, self.projections[cluster].t()) if len(self.projections) else hidden

    def logits(self, hidden: Float[Tensor, "B T D"], temperature: float = 1.0) -> Float[Tensor, "B T V"]:
        """Scores of every token, at least float32; with clusters they are log-probabilities."""
        hidden = self.transform(hidden)
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
        hidden = self.transform(hidden)
        static = hidden.is_cuda if self.static is None else self.static
        if static and (len(self.clusters) > 1 or self.chunked):
            return self._static_losses(hidden.flatten(0, 1), targets.flatten(), temperature).view(targets.shape)
        head = self._scores(hidden, 0, temperature)
        if len(self.clusters) == 1:
            return _cross_entropy(head.flatten(0, 1), targets.flatten()).view(targets.shape)
        losses = _cross_entropy(head.flatten(0, 1), self._entries(targets).flatten()).view(targets.shape)
        for i, (begin, end) in enumerate(self.clusters[1:], start=1):
            here = (targets >= begin) & (targets < end)
            tail = _cross_entropy(self._scores(hidden[here], i, temperature), targets[here] - begin)
            losses = losses + torch.zeros_like(losses).masked_scatter(here, tail)
        return losses

    def _entries(self, targets: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The entry of each target in the first softmax: the token itself, or its cluster."""
        entry, frequent = targets, self.clusters[0][1]
        for i, (begin, end) in enumerate(self.clusters[1:]):
            entry = torch.where((targets >= begin) & (targets < end), frequent + i, entry)
        return entry

    def _static_losses(
        self, hidden: Float[Tensor, "N D"], targets: Int[Tensor, "N"], temperature: float
    ) -> Float[Tensor, "N"]:
        """`losses` with static shapes and no host sync. Logits are never all in memory, except without kernels (in
        float64, or without Triton): then every cluster scores every token."""
        inside = ((targets >= 0) & (targets < self.vocabulary)).all()
        torch._assert_async(inside, f"targets must be between 0 and {self.vocabulary - 1}")
        fused = TRITON_WORKS and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
        losses = torch.zeros((), device=hidden.device)
        for i, (begin, end) in enumerate(self.clusters):
            here = (targets >= begin) & (targets < end)
            own = torch.where(here, targets - begin, 0) if i else self._entries(targets)
            if not fused:
                found = _cross_entropy(self._scores(hidden, i, temperature), own)
                losses = losses + (found.where(here, 0.0) if i else found)
                continue
            table, bias = (part.to(dtype) for part in self._table(i))
            projected = self._project(hidden, i).to(dtype)
            with torch.autocast("cuda", enabled=False):
                if i:
                    found = cluster_losses(projected, table, bias, own, here, temperature)
                else:
                    found = chunked_losses(projected, table, bias, own, temperature)
            losses = losses + found
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
