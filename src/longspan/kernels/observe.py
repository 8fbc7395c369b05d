"""A hook into attention: gives figures the tensors that a model passes to its attention kernels."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from longspan.shapes import Float, Int, Tensor


class AttentionCall(NamedTuple):
    """The arguments of one call of relative or causal attention; r, u and w are None without a position term."""

    query: Float[Tensor, "B H L D"]
    key: Float[Tensor, "B H K D"]
    r: Float[Tensor, "H C D"] | None
    u: Float[Tensor, "H D"] | None
    w: Float[Tensor, "H D"] | None
    window: int | None
    first_key: Int[Tensor, "B L"] | None
    discount: float = 0.0


observers: list[tuple[int, Callable[[AttentionCall], None]]] = []
"""(thread, callback) pairs. Kernels call `notify` only if there are any, so a compiled model never does."""


@contextmanager
def observe(callback: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Within this block `callback` gets every attention call of the current thread."""
    entry = (threading.get_ident(), callback)
    observers.append(entry)
    try:
        yield
    finally:
        observers.remove(entry)


def notify(call: AttentionCall) -> None:
    for thread, callback in list(observers):
        if thread == threading.get_ident():
            callback(call)
