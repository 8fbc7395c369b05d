"""One small model per family and scheme; the suite holds every one of them to the contract."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.config import keys
from longspan.contract import LanguageModel
from longspan.models.families import build, family

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
    "regularised": ("transformer-xl", {"memory": 40, "embedding_dropout": 0.2, "projection_dropout": 0.2, "tar": 0.3}),
    "convolution": ("transformer-xl", {"memory": 40, "convolution": 3}),
    "convolution-same-length": (
        "transformer-xl",
        {"memory": 6, "same_length": True, "convolution": 3, "norm": "pre", "embedding_width": 12, "qk_norm": True},
    ),
    "copying": ("transformer-xl", {"memory": 40, "copy": 11, "copy_width": 6}),
    "rotary": ("rotary", {"memory": 40, "head_width": 6}),
    "rotary-copying": ("rotary", {"memory": 40, "copy": 40, "copy_width": 6, "cutoffs": [7]}),
    "rotary-convolution": ("rotary", {"memory": 40, "convolution": 2, "qk_norm": True}),
    "rotary-same-length": ("rotary", {"memory": 6, "same_length": True, "activation": "squared-relu"}),
    "lstm": ("lstm", {}),
    "lstm-adaptive": ("lstm", {"layers": 1, "cutoffs": [7, 15], "div_val": 2, "tie_projections": True}),
    "awd-lstm": ("awd-lstm", {}),
    "qrnn": ("qrnn", {}),
    "qrnn-window-1": ("qrnn", {"window": 1, "layers": 3, "zoneout": 0.3}),
    "adaptive-span": ("adaptive-span", {"span": 9, "ramp": 3}),
    "adaptive-span-wide": ("adaptive-span", {"span": 40, "ramp": 4, "norm": "pre"}),
    "longformer-memory": ("longformer", {"window": [4, 6], "dilation": [[1, 2]], "memory": 10}),
    "compressive-covering": ("compressive", {"memory": 40, "compressed": 6, "rate": 2}),
}
# What a query sees depends on where the stream was cut: these are held to the law only where it says nothing of cuts.
MINDS_CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compressive-mean": ("compressive", {"memory": 6, "compressed": 5, "rate": 2, "compression": "mean"}),
    "compressive-convolution": ("compressive", {"memory": 6, "compressed": 5, "rate": 2, "norm": "pre"}),
    "compressive-most-used": ("compressive", {"memory": 6, "compressed": 5, "rate": 2, "compression": "most-used"}),
}
WITHOUT_MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "sinusoid": ("vanilla", {"position": "sinusoid"}),
    "learned": ("vanilla", {"position": "learned", "segment": 40}),
    "vanilla-shaw": ("vanilla", {"position": "shaw", "max_distance": 5}),
    "universal": ("universal", {"layers": 1, "steps": 4}),
    "universal-deep": ("universal", {"layers": 2, "steps": 2, "norm": "pre", "final_norm": True}),
    "evolved": ("evolved", {}),
    "evolved-post": ("evolved", {"norm": "post", "final_norm": False, "activation": "relu"}),
    "al-rfou": ("vanilla", {"position": "learned", "segment": 40, "layer_losses": True, "targets": 2}),
    "reformer": ("reformer", {"chunk": 4, "rounds": 2}),
    "reformer-factored": ("reformer", {"chunk": 3, "rounds": 3, "buckets": 128, "pieces": 3, "segment": 16}),
    "memory-0": ("transformer-xl", {"memory": 0}),
    "convolution-memory-0": ("transformer-xl", {"memory": 0, "convolution": 3}),
    "vanilla-convolution": ("vanilla", {"position": "shaw", "max_distance": 5, "convolution": 3}),
    "rotary-memory-0": ("rotary", {}),
    "sparse-strided": ("sparse", {"stride": 5, "segment": 40}),
    "sparse-fixed": ("sparse", {"pattern": "fixed", "stride": 6, "summary": 2, "factorised": "layers", "segment": 40}),
    "longformer": ("longformer", {"window": [9, 12], "dilation": [[1, 2], [1, 3]]}),
    "longformer-global": ("longformer", {"window": 9, "global_tokens": 3}),
    "bigbird": ("bigbird", {"block": 3, "random_blocks": 2, "global_blocks": 1, "segment": 40}),
}
LEARNED_40 = {"learned", "al-rfou", "sparse-strided", "sparse-fixed", "bigbird"}
"""Those that know 40 places and refuse more."""
# Their training loss is more than the mean; tests of their own say what.
MORE_THAN_THE_MEAN = {"al-rfou"}
SLOW = {"convolution-same-length", "convolution-memory-0", "vanilla-convolution"}
"""Of the two first families, those that `make check` leaves to `make test`."""
CUT_ANYWHERE = WITH_MEMORY | WITHOUT_MEMORY
ALL = CUT_ANYWHERE | MINDS_CUTS

MakeModel = Callable[..., LanguageModel]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make check` holds the two first families to the law, in most of their forms; `make test` all."""
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")  # type: ignore[attr-defined]
        known = isinstance(name, str) and name in ALL
        if known and (name in SLOW or ALL[name][0] not in ("transformer-xl", "vanilla")):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def make() -> MakeModel:
    def make_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> LanguageModel:
        """Weights drawn wide enough that every term of every score matters."""
        chosen, values = ALL[name]
        known = keys(family(chosen).Config)
        torch.manual_seed(7)
        model = build(chosen, {k: v for k, v in SMALL.items() if k in known} | values | changes).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
            if getattr(model, "copying", None) is not None:
                model.copying.bias.fill_(-10.0)  # as large a share for what is copied as for the vocabulary
        return model.eval()

    return make_model


def no_dropout(name: str) -> dict[str, float]:
    """Every rate at which a family leaves something out at random, set to zero."""
    rates = [key for key in keys(family(ALL[name][0]).Config) if key.endswith(("dropout", "zoneout"))]
    return dict.fromkeys(rates, 0.0)


def stream(batch: int, count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a random text."""
    ids = torch.randint(VOCABULARY, (batch, count + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]
