"""Ways to tell positions: sinusoids of a distance or a place, learned vectors per distance, rotation."""

from collections.abc import Callable

import torch
from torch import nn

from longspan.shapes import Float, Int, Tensor


def sinusoid(places: Float[Tensor, "C"], width: int) -> Float[Tensor, "C D"]:
    """[sin(p f_0) ... sin(p f_n), cos(p f_0) ... cos(p f_n)], f_k = 10000^(-2k / width) (Vaswani et al. 2017).

    Sines first, then cosines, as the authors of Transformer-XL lay them out; Vaswani et al. interleave them. The angle
    is computed in float64 and rounded once: in float32 it is 1e-4 off at distances of a few thousand.
    """
    steps = torch.arange(0, width, 2, dtype=torch.float64, device=places.device)
    angle = places.double()[:, None] * 10000.0 ** (-steps / width)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width]


def distance_sinusoid(count: int, width: int, device: torch.device) -> Float[Tensor, "C D"]:
    """R of the distances count-1, ..., 1, 0."""
    return sinusoid(torch.arange(count - 1, -1, -1, device=device, dtype=torch.float64), width)


def place_in_document(first_key: Int[Tensor, "B T"] | None, tokens: int, device: torch.device) -> Int[Tensor, "R T"]:
    """0, 1, 2, ... from the segment's or the document's first token on; one row where all rows are alike."""
    place = torch.arange(tokens, device=device)[None]
    return place if first_key is None else place - first_key


def place_sinusoid(place: Int[Tensor, "R T"], width: int) -> Float[Tensor, "R T D"]:
    """What is added to an embedding to tell its place (Vaswani et al. 2017)."""
    return sinusoid(place.flatten().double(), width).view(*place.shape, -1)


class SinusoidDistances(nn.Module):
    """r = Wr R for the distances count-1, ..., 0: Dai et al. 2019, the key of a distance.

    With fixed weights r is the same for every segment; it is kept only where the caller says that they are fixed
    (`LanguageModel.fixed_weights`). Fewer distances are the end of the same table.
    """

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, heads * head_width, bias=False)  # Wr
        self.heads = heads
        self.fixed = 0  # open blocks of `fixed_weights`: threads may share a model
        self._kept: Float[Tensor, "H C D"] | None = None

    def fix(self, fixed: bool) -> None:
        self.fixed, self._kept = self.fixed + (1 if fixed else -1), None

    def forward(self, count: int, R: Callable[[int], Float[Tensor, "C E"]]) -> Float[Tensor, "H C D"]:
        if not self.fixed or torch.is_grad_enabled():  # what is kept has no gradient
            return self._project(R(count))
        kept = self._kept  # read once: another thread may clear it
        if kept is None or kept.shape[1] < count:
            kept = self._kept = self._project(R(count))
        return kept[:, -count:]

    def _project(self, R: Float[Tensor, "C E"]) -> Float[Tensor, "H C D"]:
        return self.projection(R).unflatten(-1, (self.heads, -1)).transpose(0, 1)


class ShawDistances(nn.Module):
    """One learned vector per head and distance, distances beyond the last taken as the last: Shaw et al. 2018, eq. 4.

    Deviations: one table per head, as in the authors' Transformer-XL code (Shaw et al. share it among heads); no
    vectors are added to the values (their eq. 3, which their own ablation finds no gain from).
    """

    def __init__(self, heads: int, head_width: int, max_distance: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(heads, max_distance + 1, head_width))

    def forward(self, count: int) -> Float[Tensor, "H C D"]:
        """Vectors of the distances min(count, known)-1, ..., 0; row d of the table is distance d."""
        return self.table[:, :count].flip(1)


def rotary_table(count: int, head_width: int, device: torch.device) -> Float[Tensor, "2 K D"]:
    """Cosines and sines of the places 0..count-1, one per pair of a head's numbers (Su et al. 2021)."""
    steps = torch.arange(0, head_width, 2, dtype=torch.float64, device=device)
    angle = torch.arange(count, dtype=torch.float64, device=device)[:, None] * 10000.0 ** (-steps / head_width)
    return torch.stack([angle.cos(), angle.sin()])


class Rotation:
    """Turns each pair (x_k, x_{k + D/2}) of a head's numbers by its place times a frequency."""

    def __init__(self, table: Float[Tensor, "2 K D"]) -> None:
        self.table = table

    def last(self, count: int) -> "Rotation":
        """The same for the last `count` places."""
        return Rotation(self.table[:, -count:])

    def __call__(self, x: Float[Tensor, "B H K D"]) -> Float[Tensor, "B H K D"]:
        cos, sin = self.table.to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
