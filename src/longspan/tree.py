"""Trees of tensors: nested tuples and NamedTuples."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from longspan.shapes import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with `change` applied to every tensor."""
    if isinstance(tree, Tensor):
        return change(tree)
    children = [map_tensors(change, child) for child in tree]
    return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path, in order: `0.keys`, `0.values`, `1.keys`, ..."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    names: Sequence[Any] = getattr(tree, "_fields", range(len(tree)))
    for name, child in zip(names, tree, strict=True):
        yield from named_tensors(child, f"{prefix}.{name}" if prefix else str(name))
