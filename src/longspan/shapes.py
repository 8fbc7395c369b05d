"""The letters of tensor axes in shape annotations.

    B  rows of a batch          V  vocabulary
    T  tokens of a call         H  heads
    L  queries of a segment     D  width of a head; of the model where there are no heads
    M  cached positions         E  width of the model where D is that of a head
    K  keys, M + L              C  distances in a position table

Annotations have the form `Float[Tensor, "B H L D"]`. Tests check them with jaxtyping and beartype. jaxtyping is
optional: without it (the core needs only torch, numpy and safetensors) annotations are plain tensors and cost nothing.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Shaped:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = _Shaped

__all__ = ["Bool", "Float", "Int", "Tensor"]
