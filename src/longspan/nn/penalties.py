"""Penalties on the outputs of a model, added to its training loss."""

from torch import nn

from longspan.nn.precision import wide
from longspan.nn.whole_batch import mean_of_marked
from longspan.shapes import Bool, Float, Tensor


class ActivationPenalty(nn.Module):
    """AR and TAR (Merity et al. 2017, section 4.6), with the dropout mask m of the output h and means over rows,
    positions and units:

        loss + ar mean((m h_t)^2) + tar mean((h_t - h_{t-1})^2)          the paper's alpha and beta
    """

    def __init__(self, ar: float, tar: float) -> None:
        super().__init__()
        self.ar, self.tar = ar, tar

    def forward(
        self,
        loss: Float[Tensor, ""],
        dropped: Float[Tensor, "B T D"],
        output: Float[Tensor, "B T D"],
        starts: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, ""]:
        """The loss with both penalties; outside training mode, the loss itself."""
        if not self.training:
            return loss
        return loss + self.ar * mean_square(dropped).mean() + self.tar * mean_square_change(output, starts)


def mean_square(h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    """Mean over the units, in float32 or wider."""
    return h.to(wide(h.dtype)).square().mean(dim=-1)


def mean_square_change(h: Float[Tensor, "B T D"], starts: Bool[Tensor, "B T"] | None) -> Float[Tensor, ""]:
    """mean((h_t - h_{t-1})^2) over neighbours in the same document."""
    changes = mean_square(h[:, 1:] - h[:, :-1])
    if starts is None:
        return changes.sum() / max(changes.numel(), 1)
    within = ~starts[:, 1:]
    return mean_of_marked((changes * within).sum(), within)
