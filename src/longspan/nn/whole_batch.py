"""A batch whose rows are divided among processes, as if one process had all of them.

Most training losses are means over rows, so the mean over processes is that of the whole batch. Two things need more: a
mean over some of the rows or positions (`mean_of_marked`), and dropout (`DividedRows`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class Division:
    """This process has part `rank` of `size` equal parts of the rows; `group` is used for counts. With `same_masks`,
    dropout is that of one process with all rows."""

    rank: int
    size: int
    group: Any
    same_masks: bool


_current: Division | None = None  # not a ContextVar, which torch.compile cannot trace


def division() -> Division | None:
    """How the rows are divided here. A backward pass needs it from the forward pass: torch runs it without modes, and
    on a GPU in another thread."""
    return _current


def divided(division: Division | None) -> AbstractContextManager[Any]:
    """Within this block the rows are divided like this; with None, not at all."""
    if division is None:
        return nullcontext()
    return DividedRows(division) if division.same_masks else _known(division)


@contextmanager
def _known(division: Division) -> Iterator[None]:
    global _current
    before, _current = _current, division
    try:
        yield
    finally:
        _current = before


def sum_over_batch(own: Tensor, division: Division | None) -> Tensor:
    """The sum of a tensor over all processes of a divided batch."""
    if division is None:
        return own
    total = own.clone()
    dist.all_reduce(total, group=division.group)
    return total


def random_rows(like: Tensor) -> Float[Tensor, "B ..."]:
    """Uniform random numbers in the shape of a tensor whose rows are divided: those of the own rows in a draw for the
    whole batch."""
    here, shape = division(), like.shape
    if here is None or not here.same_masks:
        return torch.rand(shape, device=like.device)
    drawn = torch.rand((shape[0] * here.size, *shape[1:]), device=like.device)
    return drawn[shape[0] * here.rank :][: shape[0]]


def row_before(own: Int[Tensor, "B ..."]) -> Int[Tensor, "B ..."]:
    """For every row of the whole batch the row before it; for the first one, the last."""
    here = division()
    if here is None:
        return own.roll(1, 0)
    rows = [torch.empty_like(own) for _ in range(here.size)]
    dist.all_gather(rows, own.contiguous(), group=here.group)
    return torch.cat([rows[here.rank - 1][-1:], own[:-1]])


def has_several_rows(own: Tensor) -> bool:
    """Whether the whole batch has more than one row."""
    here = division()
    return len(own) * (1 if here is None else here.size) > 1


def largest_in_batch(own: int) -> int:
    """The largest of the values that the processes of a divided batch have, for axes of the same length in all."""
    here = division()
    if here is None:
        return own
    largest = torch.tensor(own)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=here.group)
    return int(largest)


def mean_of_marked(total: Float[Tensor, ""], marks: Bool[Tensor, "..."]) -> Float[Tensor, ""]:
    """The mean of some values from their sum and their marks; 0 if there are none. In a divided batch, the mean of the
    results over processes is that of the whole batch."""
    here = division()
    count = sum_over_batch(marks.sum(), here).clamp(min=1)
    return total / count if here is None else total * here.size / count


class DividedRows(TorchFunctionMode):
    """Within this block dropout draws the mask of the whole batch and uses its own rows.

    So all processes keep the same random state, and a run does not depend on their number. Tensors with three axes or
    more have the batch first; the others (positions, words, weights) are shared by all rows, and so are their masks.
    """

    def __init__(self, division: Division) -> None:
        super().__init__()
        self.division = division

    def __enter__(self) -> "DividedRows":
        self.known = _known(self.division)
        self.known.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.known.__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.dropout:
            return self.dropout(*args, **given)
        if func is F.scaled_dot_product_attention and given.get("dropout_p"):
            return self.attention(*args, **given)
        return func(*args, **given)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p or x.dim() < 3:
            return F.dropout(x, p, training, inplace)
        return x * self.mask(x, p)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        """The definition, because torch's function draws the mask itself."""
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        weights = scores.softmax(-1)
        return weights * self.mask(weights, dropout_p) @ value

    def mask(self, x: Tensor, p: float) -> Float[Tensor, "B ..."]:
        """The factors of the own rows. The strides are those of the result, because they change the order of the draws:
        those of x, except if x is expanded."""
        rows = x.shape[0]
        strides = torch.empty_like(x, device="meta").stride()
        order = sorted(range(x.dim()), key=lambda axis: -strides[axis])
        shape = (rows * self.division.size, *x.shape[1:])
        ones = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).fill_(1.0)
        return F.dropout(ones, p)[rows * self.division.rank :][:rows]
