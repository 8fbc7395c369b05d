"""Penalties on what a model puts out, which join its loss while it is trained."""

from torch import nn

from longspan.layers.recurrent import wide
from longspan.shapes import Bool, Float, Tensor


class ActivationPenalty(nn.Module):
    """AR and TAR (Merity et al. 2017, section 4.6): m being the mask of the output h, means over rows, positions and
    units,

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
        """The loss with both; as it is where the model is not trained."""
        if not self.training:
            return loss
        return loss + self.ar * mean_square(dropped).mean() + self.tar * slowness(output, starts)


def mean_square(h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    """Over the units; in float32 or wider, whatever h came in."""
    return h.to(wide(h.dtype)).square().mean(dim=-1)


def slowness(h: Float[Tensor, "B T D"], starts: Bool[Tensor, "B T"] | None) -> Float[Tensor, ""]:
    """mean((h_t - h_{t-1})^2) over neighbours of one document: at another's first token h has every right to jump."""
    jumps = mean_square(h[:, 1:] - h[:, :-1])
    if starts is None:
        return jumps.sum() / max(jumps.numel(), 1)
    within = ~starts[:, 1:]
    return (jumps * within).sum() / within.sum().clamp(min=1)
