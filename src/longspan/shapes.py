"""The letters of the axes, fixed once for the whole house.

    B  rows of a batch          V  vocabulary
    T  tokens of a call         H  heads
    L  queries of a segment     D  width: of a head where heads are in play, of the model elsewhere
    M  remembered positions     E  width of the model where D is a head's
    K  keys, M + L              C  distances a position table knows

Annotations read `Float[Tensor, "B H L D"]`. Tests check them with jaxtyping and beartype; where jaxtyping is
not installed (the core needs torch, numpy and safetensors alone) they cost nothing and mean the same to a reader.
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
