"""Helpers for comparisons with `transformer-xl`, whose weights have their own names."""

from typing import Any

from torch import nn

from longspan.checkpoints.upgrade import upgrade_name

PAPER: dict[str, Any] = {
    "norm": "post",
    "norm_type": "layer",
    "final_norm": False,
    "activation": "relu",
    "biases": True,
    "qk_norm": False,
    "convolution": 0,
    "shared_biases": True,
}
"""The config of longspan-xl with all its parts turned off."""


def paper_name(name: str) -> str:
    """The name in `transformer-xl` of a weight of a family that is built from the shared layers."""
    return upgrade_name("transformer-xl", name)


def load_paper_weights(model: nn.Module, paper: nn.Module) -> list[str]:
    """Copy the weights of a `transformer-xl` to another family. Returns the names of weights that it does not have."""
    weights = paper.state_dict()
    known = {name: weights[paper_name(name)] for name in model.state_dict() if paper_name(name) in weights}
    assert len(known) == len(weights), "every weight of transformer-xl must be used"
    missing, _ = model.load_state_dict(known, strict=False)
    return missing
