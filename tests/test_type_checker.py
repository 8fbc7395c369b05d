"""Wrong shapes and types are errors in every test: each checks the first calls of every function."""

import pytest
import torch

from longspan.nn.positions import sinusoid

pytest.importorskip("jaxtyping")


@pytest.mark.parametrize("earlier_calls", [0, 1, 2])
def test_wrong_shapes_are_errors(earlier_calls: int) -> None:
    for _ in range(earlier_calls):
        sinusoid(torch.arange(3.0), 4)
    with pytest.raises(Exception, match=r"(?s)sinusoid.*positions"):
        sinusoid(torch.zeros(3, 3), 4)


def test_every_test_starts_anew() -> None:
    for _ in range(2):
        with pytest.raises(Exception, match=r"(?s)sinusoid.*positions"):
            sinusoid(torch.zeros(3, 3), 4)
