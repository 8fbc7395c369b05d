"""The two caches of an attention layer: hidden states for training, keys and values for fixed weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from longspan.shapes import Float, Tensor


class Memory(NamedTuple):
    """A layer's inputs at earlier positions, detached. They are projected again in every segment, because gradients
    reach Wk and Wv through them."""

    hidden: Float[Tensor, "B M E"]

    @property
    def positions(self) -> int:
        return self.hidden.shape[1]

    @property
    def trainable(self) -> bool:
        return True

    def trim(self, limit: int) -> "Memory":
        return Memory(last(self.hidden, limit, dim=1))


class KeyValueCache(NamedTuple):
    """Keys and values of earlier positions. With fixed weights they give the numbers that `Memory` gives, and nothing
    is projected twice."""

    keys: Float[Tensor, "B H M D"]
    values: Float[Tensor, "B H M D"]

    @property
    def positions(self) -> int:
        return self.keys.shape[2]

    @property
    def trainable(self) -> bool:
        return False

    def trim(self, limit: int) -> "KeyValueCache":
        return KeyValueCache(last(self.keys, limit, dim=2), last(self.values, limit, dim=2))


AttentionCache = Memory | KeyValueCache
Project = Callable[[Float[Tensor, "B K E"]], tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"]]]


def empty_cache(
    like: Tensor, batch: int, positions: int, *, width: int, heads: int, head_width: int, trainable: bool
) -> AttentionCache:
    """A cache of this many positions, all zero and none of them valid."""
    if trainable:
        return Memory(expanded_zeros(like, batch, positions, width))
    zeros = expanded_zeros(like, batch, heads, positions, head_width)
    return KeyValueCache(zeros, zeros)


def expanded_zeros(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros that take no memory: a single one, expanded. A long memory costs nothing before it is filled."""
    return like.new_zeros((), dtype=dtype).expand(shape)


def extend(
    cache: AttentionCache | None,
    x: Float[Tensor, "B T E"],
    project: Project,
    limit: int,
    project_both: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Float[Tensor, "B H K D"], Float[Tensor, "B H K D"], AttentionCache | None]:
    """Keys and values of [cached positions; segment], and the cache after the segment, at most `limit` positions.

    Without a cache, or with one of size 0, those of the segment only. `project_both`, if given, is called with a memory
    and the segment in place of `project`.
    """
    if cache is None or (cache.positions == 0 and limit == 0):
        return *project(x), cache
    if isinstance(cache, Memory):
        context = torch.cat([cache.hidden.to(x.dtype), x], dim=1)
        projected = project(context) if project_both is None else project_both(cache.hidden, x)
        return *projected, Memory(newest(context.detach(), x.detach(), limit, dim=1))
    new_keys, new_values = project(x)
    keys, values = join(cache.keys, new_keys), join(cache.values, new_values)
    pairs = (keys, new_keys), (values, new_values)
    return keys, values, KeyValueCache(*(newest(old.detach(), new.detach(), limit, dim=2) for old, new in pairs))


def join(old: Float[Tensor, "B H M D"], new: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H K D"]:
    """[old; new] along the positions, in the layout that attention reads fastest.

    On a GPU heads stay interleaved, in the layout of the projection, so complete rows are copied: six times as fast. A
    CPU reads the keys of each head several times, which is faster when they are contiguous.
    """
    old = old.to(new.dtype)
    if new.is_cuda:
        return torch.cat([old.transpose(1, 2), new.transpose(1, 2)], dim=1).transpose(1, 2)
    return torch.cat([old, new], dim=2)


def newest(context: Tensor, segment: Tensor, limit: int, dim: int) -> Tensor:
    """The last `limit` positions of [cached; segment]: a view, so that the next `join` is the only copy.

    If the segment is long enough, the view is of the segment. Then the longer buffer can be freed, and strides are the
    same at every step, so a compiled step is not recompiled.
    """
    return last(segment if segment.shape[dim] >= limit else context, limit, dim)


def last(x: Tensor, count: int, dim: int) -> Tensor:
    """At most `count` positions from the end."""
    size = x.shape[dim]
    return x.narrow(dim, max(size - count, 0), min(size, count))
