"""Position encodings: sinusoids of distances or positions, learned vectors per distance, rotation."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from longspan.contract import State
from longspan.shapes import Float, Int, Tensor


def sinusoid(positions: Float[Tensor, "C"], width: int) -> Float[Tensor, "C D"]:
    """[sin(p f_0) ... sin(p f_n), cos(p f_0) ... cos(p f_n)] with f_k = 10000^(-2k / width) (Vaswani et al. 2017).

    Sines first, then cosines, as in the authors' Transformer-XL code; Vaswani et al. interleave them. The angle is
    computed in float64, because in float32 its error is 1e-4 at distances of a few thousand.
    """
    steps = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angle = positions.double()[:, None] * 10000.0 ** (-steps / width)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width]


def distance_sinusoid(count: int, width: int, like: Tensor) -> Float[Tensor, "C D"]:
    """R of the distances count-1, ..., 1, 0, on the device and in the dtype of `like`."""
    return sinusoid(descending_distances(count, like), width).to(like.dtype)


def log_distance_sinusoid(count: int, width: int, like: Tensor) -> Float[Tensor, "C D"]:
    """R of the distances count-1, ..., 1, 0: one half has the sinusoids of d, the other those of 8 log2(1 + d).

    A quarter of the sinusoids of d turn by less than a radian within a thousand positions.
    """
    distances = descending_distances(count, like)
    half = width // 2
    parts = sinusoid(distances, width - half), sinusoid(8 * (1 + distances).log2(), half)
    return torch.cat(parts, dim=-1).to(like.dtype)


def descending_distances(count: int, like: Tensor) -> Float[Tensor, "C"]:
    return torch.arange(count - 1, -1, -1, device=like.device, dtype=torch.float64)


def position_in_document(first_key: Int[Tensor, "B T"] | None, tokens: int, device: torch.device) -> Int[Tensor, "R T"]:
    """0, 1, 2, ... from the first token of the segment or the document; a single row if all rows are equal."""
    position = torch.arange(tokens, device=device)[None]
    return position if first_key is None else position - first_key


def position_sinusoid(position: Int[Tensor, "R T"], width: int) -> Float[Tensor, "R T D"]:
    """Absolute positions to add to an embedding (Vaswani et al. 2017)."""
    return sinusoid(position.flatten().double(), width).view(*position.shape, -1)


class PositionKeys(nn.Module):
    """r = Wr R: the key of each distance (Dai et al. 2019)."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, heads * head_width, bias=False)  # Wr
        self.heads = heads

    def forward(self, R: Float[Tensor, "C E"]) -> Float[Tensor, "H C D"]:
        return self.projection(R).unflatten(-1, (self.heads, -1)).transpose(0, 1)


def reusable_tables(
    projections: Sequence[Callable[[Tensor], Tensor]],
    counts: Sequence[int],
    state: State,
    sinusoids: Callable[[int], Float[Tensor, "C E"]],
) -> tuple[list[Float[Tensor, "H _ D"]], tuple[Float[Tensor, "H _ D"], ...]]:
    """r of every layer for its number of distances, and the tables that the state keeps for the next segment.

    With fixed weights a table is computed once per stream and grows by powers of two. Distances descend to 0, so a
    shorter table is the end of a longer one.
    """
    kept, sizes, fixed = state.shared, list(counts), weights_are_fixed(state)
    if not fixed:
        kept = ()
    elif not kept or any(r.shape[1] < count for r, count in zip(kept, counts, strict=True)):
        kept, sizes = (), [1 << (count - 1).bit_length() for count in counts]
    if not kept:
        R = {size: sinusoids(size) for size in dict.fromkeys(sizes)}
        kept = tuple(project(R[size]) for project, size in zip(projections, sizes, strict=True))
    # A slice of a complete table would still cost its gradient two kernels per layer.
    keys = [r if r.shape[1] == count else r[:, -count:] for r, count in zip(kept, counts, strict=True)]
    return keys, kept if fixed else ()


def weights_are_fixed(state: State) -> bool:
    """Whether what follows from the weights alone may be kept in the state: it must not carry a gradient."""
    return not state.caches[0].trainable and not torch.is_grad_enabled()


class ShawDistances(nn.Module):
    """One learned vector per head and distance; distances beyond the last share its vector (Shaw et al. 2018, eq. 4).

    Deviations: one table per head, as in the authors' Transformer-XL code (Shaw et al. share it among heads); nothing
    is added to the values (their eq. 3, which does not help in their own ablation).
    """

    def __init__(self, heads: int, head_width: int, max_distance: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(heads, max_distance + 1, head_width))

    def forward(self, count: int) -> Float[Tensor, "H C D"]:
        """Vectors of the distances min(count, max_distance + 1) - 1, ..., 0; row d of the table is distance d."""
        return self.table[:, :count].flip(1)


def rotary_table(count: int, head_width: int, like: Tensor) -> Float[Tensor, "2 K D"]:
    """Cosines and sines of the positions 0..count-1, one per pair of units of a head (Su et al. 2021)."""
    steps = torch.arange(0, head_width, 2, dtype=torch.float64, device=like.device)
    angle = torch.arange(count, dtype=torch.float64, device=like.device)[:, None] * 10000.0 ** (-steps / head_width)
    return torch.stack([angle.cos(), angle.sin()]).to(like.dtype)


class Rotation:
    """Rotates each pair (x_k, x_{k + D/2}) of units of a head by its position times a frequency."""

    def __init__(self, table: Float[Tensor, "2 K D"]) -> None:
        self.table = table

    def last(self, count: int) -> "Rotation":
        """The rotation of the last `count` positions."""
        return Rotation(self.table[:, -count:])

    def __call__(self, x: Float[Tensor, "B H K D"]) -> Float[Tensor, "B H K D"]:
        cos, sin = self.table.to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
