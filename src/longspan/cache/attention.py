"""The two caches of an attention layer: hidden states for training, keys and values for fixed weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

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
    return keys, values, newest_pairs(keys, values, x.shape[1], limit)


def join(old: Float[Tensor, "B H M D"], new: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H K D"]:
    """[old; new] along the positions, in the layout that attention reads fastest.

    On a GPU heads stay interleaved, in the layout of the projection, so complete rows are copied: six times as fast. A
    CPU reads the keys of each head several times, which is faster when they are contiguous.
    """
    old = old.to(new.dtype)
    if new.is_cuda:
        return torch.cat([old.transpose(1, 2), new.transpose(1, 2)], dim=1).transpose(1, 2)
    return torch.cat([old, new], dim=2)


def join_product(
    old: Float[Tensor, "B H M D"], x: Float[Tensor, "B T E"], layer: nn.Module
) -> Float[Tensor, "B H K D"]:
    """[old; new], where new are the heads of `layer(x)`. With fixed weights on a GPU, the product is written beside the
    old positions instead of being copied there."""
    if x.is_cuda and type(layer) is nn.Linear and is_plain_product(layer, x):
        return product_beside(old, x, layer.weight)
    return join(old, layer(x).unflatten(-1, (old.shape[1], -1)).transpose(1, 2))


def is_plain_product(layer: nn.Linear, x: Tensor) -> bool:
    """Whether `layer(x)` is x W^T in the dtype of x, without a gradient."""
    gradient = torch.is_grad_enabled() and (x.requires_grad or layer.weight.requires_grad)
    converted = torch.is_autocast_enabled(x.device.type) or layer.weight.dtype != x.dtype
    return layer.bias is None and not gradient and not converted and not torch.compiler.is_compiling()


def product_beside(
    old: Float[Tensor, "B H M D"], x: Float[Tensor, "B T E"], weight: Float[Tensor, "F E"]
) -> Float[Tensor, "B H K D"]:
    B, H, M, D = old.shape
    joined = x.new_empty(B, M + x.shape[1], H * D)
    by_head = joined.unflatten(-1, (H, D)).transpose(1, 2)
    by_head[:, :, :M] = old
    if B == 1:
        torch.mm(x[0], weight.t(), out=joined[0, M:])
    else:
        torch.bmm(x, weight.t().expand(B, -1, -1), out=joined[:, M:])
    return by_head


def newest_pairs(keys: Float[Tensor, "B H K D"], values: Float[Tensor, "B H K D"], T: int, limit: int) -> KeyValueCache:
    """The last `limit` of K positions, of which T are new. If the new ones are enough, they are copied: a view would
    keep all T in memory. Otherwise a view, so that the next `join` is the only copy."""
    kept = (last(x.detach(), limit, dim=2) for x in (keys, values))
    return KeyValueCache(*(x.clone() if limit <= T else x for x in kept))


def newest(context: Tensor, segment: Tensor, limit: int, dim: int) -> Tensor:
    """The last `limit` positions of [cached; segment]: a view, so that the next segment makes the only copy.

    If the segment is long enough, the view is of the segment. Then the longer buffer can be freed, and strides are the
    same at every step, so a compiled step is not recompiled.
    """
    return last(segment if segment.shape[dim] >= limit else context, limit, dim)


def last(x: Tensor, count: int, dim: int) -> Tensor:
    """At most `count` positions from the end."""
    size = x.shape[dim]
    return x.narrow(dim, max(size - count, 0), min(size, count))
