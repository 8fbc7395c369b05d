"""Relative attention: the definition and its fast forms, and the one entry that chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longspan.errors import UnknownNameError
from longspan.kernels.relative_attention import reference, skewed
from longspan.shapes import Float, Int, Tensor

FORMS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.relative_attention,
    "skewed": skewed.relative_attention,
}
_forced: list[str] = []


@contextmanager
def forced(form: str) -> Iterator[None]:
    """Within this block every call takes the named form: for tests, benchmarks and doubt."""
    if form not in FORMS:
        raise UnknownNameError("form of relative attention", form, FORMS)
    _forced.append(form)
    try:
        yield
    finally:
        _forced.pop()


def relative_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    *,
    window: int | None = None,
    first_key: Int[Tensor, "B L"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """As `reference.relative_attention` defines it, in the fastest form this device has."""
    form = _forced[-1] if _forced else "skewed"
    return FORMS[form](query, key, value, distance, u, w, window=window, first_key=first_key, dropout=dropout)
