"""Dtypes for computations that need more precision than the weights have."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32: for sums over many positions or units, and for probabilities."""
    return torch.promote_types(dtype, torch.float32)
