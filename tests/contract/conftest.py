"""One small model per family and scheme; the suite holds every one of them to the contract."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.contract import LanguageModel
from longspan.models.families import build

VOCABULARY = 23
SMALL = {"vocabulary": VOCABULARY, "layers": 2, "width": 16, "heads": 2, "inner": 24, "segment": 8, "dropout": 0.1}

WITH_MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("transformer-xl", {"memory": 40}),
    "same-length": ("transformer-xl", {"memory": 6, "same_length": True}),
    "same-length-clamp": ("transformer-xl", {"memory": 9, "same_length": True, "clamp": 4}),
    "pre-norm": ("transformer-xl", {"memory": 40, "norm": "pre", "final_norm": True, "activation": "gelu"}),
    "own-biases": ("transformer-xl", {"memory": 40, "shared_biases": False, "head_width": 5}),
    "adaptive": ("transformer-xl", {"memory": 40, "cutoffs": [7, 15], "div_val": 2, "tie_projections": True}),
    "narrow-embedding": ("transformer-xl", {"memory": 40, "cutoffs": [7], "embedding_width": 12}),
    "shaw": ("transformer-xl", {"memory": 40, "position": "shaw"}),
    "shaw-near": ("transformer-xl", {"memory": 7, "same_length": True, "position": "shaw", "max_distance": 3}),
}
WITHOUT_MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "sinusoid": ("vanilla", {"position": "sinusoid"}),
    "learned": ("vanilla", {"position": "learned", "segment": 40}),
    "vanilla-shaw": ("vanilla", {"position": "shaw", "max_distance": 5}),
    "al-rfou": ("vanilla", {"position": "learned", "segment": 40, "layer_losses": True, "targets": 2}),
    "reformer": ("reformer", {"chunk": 4, "rounds": 2}),
    "reformer-factored": ("reformer", {"chunk": 3, "rounds": 3, "buckets": 128, "pieces": 3, "segment": 16}),
    "memory-0": ("transformer-xl", {"memory": 0}),
}
# Their training loss is more than the mean; tests of their own say what.
MORE_THAN_THE_MEAN = {"al-rfou"}
ALL = WITH_MEMORY | WITHOUT_MEMORY

MakeModel = Callable[..., LanguageModel]


@pytest.fixture
def make() -> MakeModel:
    def make_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> LanguageModel:
        """Weights drawn wide enough that every term of every score matters."""
        family, values = ALL[name]
        torch.manual_seed(7)
        model = build(family, {**SMALL, **values, **changes}).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        return model.eval()

    return make_model


def stream(batch: int, count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a random text."""
    ids = torch.randint(VOCABULARY, (batch, count + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]
