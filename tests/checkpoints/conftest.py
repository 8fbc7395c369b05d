"""Small models to save and damage, and the number of trials of the long tests: more with LONGSPAN_TORTURE=1."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.contract import LanguageModel
from longspan.tokenizers import ByteTokenizer, Tokenizer, WordTokenizer
from tests.support import build

SMALL = {"layers": 2, "width": 8, "heads": 2, "inner": 12, "segment": 4, "dropout": 0.0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("transformer-xl", {"memory": 6}),
    "untied": ("transformer-xl", {"memory": 6, "tie_embedding": False, "shared_biases": False, "norm": "pre"}),
    "adaptive": (
        "transformer-xl",
        {"memory": 6, "vocabulary": 30, "cutoffs": [10, 20], "div_val": 2, "tie_projections": True},
    ),
    "variant": ("longspan-xl", {"memory": 6}),
    "vanilla": ("vanilla", {}),
}


@pytest.fixture
def trials() -> Callable[[int, int], int]:
    """The number of trials: the first number by default, the second with LONGSPAN_TORTURE=1."""
    return lambda short, full: full if os.environ.get("LONGSPAN_TORTURE") == "1" else short


@pytest.fixture
def small() -> Callable[..., tuple[LanguageModel, Tokenizer]]:
    """A small model of one of the FORMS with random parameters, and a tokenizer of its size."""

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
