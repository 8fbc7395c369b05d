"""Auxiliary training losses: predictions of lower layers, and of tokens further ahead."""

import torch
from torch import nn

from longspan.contract import Head
from longspan.nn.embedding import AdaptiveEmbedding
from longspan.nn.transformer import TransformerConfig
from longspan.shapes import Float, Int, Tensor

FURTHER_AHEAD = 0.5


class AuxiliaryLosses(nn.Module):
    """The auxiliary losses of Al-Rfou et al. 2018 for layers, targets and positions.

        loss = sum over layers l of n of  c_l ( L_l1 + 0.5 sum over k = 2.. of L_lk )
        L_lk = mean over t of  -log p_lk(x_{t+k})          c_l = max(0, 1 - progress 2n / l), and 1 for the last

    without L_n1, the model's main loss. Every p_lk is a separate classifier on the output of layer l, used in training
    only. The last k-1 positions of a segment have no target x_{t+k} in it and do not count.
    """

    def __init__(
        self, config: TransformerConfig, embedding: AdaptiveEmbedding, every_layer: bool, targets: int
    ) -> None:
        super().__init__()
        n = config.layers
        self.scored = [
            (layer, ahead)
            for layer in range(1 if every_layer else n, n + 1)
            for ahead in range(1, targets + 1)
            if (layer, ahead) != (n, 1)
        ]
        self.heads = nn.ModuleList(config.make_head(embedding, tied=False) for _ in self.scored)

    def forward(
        self, hidden: tuple[Tensor, ...], targets: Int[Tensor, "B T"], progress: float | Float[Tensor, ""]
    ) -> Float[Tensor, ""]:
        n, T = len(hidden) - 1, targets.shape[1]
        total = torch.zeros((), device=targets.device)
        for (layer, ahead), head in zip(self.scored, self.heads, strict=True):
            # In a compiled step `progress` is a tensor, so a layer past its time gets weight 0 instead of being
            # skipped.
            share = 1.0 if layer == n else 1.0 - progress * (2 * n / layer)
            if isinstance(share, Tensor):
                share = share.clamp(min=0)
            elif share <= 0:
                continue
            if ahead > T:
                continue
            assert isinstance(head, Head)
            losses = head.losses(hidden[layer][:, : T - ahead + 1], targets[:, ahead - 1 :])
            total = total + (1.0 if ahead == 1 else FURTHER_AHEAD) * share * losses.mean()
        return total
