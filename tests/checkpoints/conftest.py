"""Small models to save and break, and the size of the long tests: short in the suite, full with LONGSPAN_TORTURE=1."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.contract import LanguageModel
from longspan.models.families import build
from longspan.tokens import ByteTokenizer, Tokenizer, WordTokenizer

SMALL = {"layers": 2, "width": 8, "heads": 2, "inner": 12, "segment": 4, "dropout": 0.0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("transformer-xl", {"memory": 6}),
    "untied": ("transformer-xl", {"memory": 6, "tie_embedding": False, "shared_biases": False, "norm": "pre"}),
    "adaptive": (
        "transformer-xl",
        {"memory": 6, "vocabulary": 30, "cutoffs": [10, 20], "div_val": 2, "tie_projections": True},
    ),
    "vanilla": ("vanilla", {}),
}


@pytest.fixture
def trials() -> Callable[[int, int], int]:
    """How many trials: the first number in the suite, the second under torture."""
    return lambda short, full: full if os.environ.get("LONGSPAN_TORTURE") == "1" else short


@pytest.fixture
def small() -> Callable[..., tuple[LanguageModel, Tokenizer]]:
    """A small model of one of the FORMS, every parameter drawn, and a tokenizer of its size."""

    def make(form: str = "plain", seed: int = 0) -> tuple[LanguageModel, Tokenizer]:
        family, values = FORMS[form]
        torch.manual_seed(seed)
        model = build(family, SMALL | values).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        size = model.config.vocabulary
        words = WordTokenizer((*(f"w{k}" for k in range(size - 1)), "<unk>"))
        return model, ByteTokenizer() if size == 256 else words

    return make
