"""One small model per family and variant; the contract suite runs on all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.config import keys
from longspan.contract import LanguageModel
from longspan.models.families import BUILT_IN, family, known_families
from tests.models.paper import PAPER
from tests.support import READING, build

VOCABULARY = 23
SMALL = {"vocabulary": VOCABULARY, "layers": 2, "width": 16, "heads": 2, "inner": 24, "segment": 8, "dropout": 0.1}

WITH_MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("transformer-xl", {"memory": 40}),
    "same-length": ("transformer-xl", {"memory": 6, "same_length": True}),
    "same-length-clamp": ("transformer-xl", {"memory": 9, "same_length": True, "clamp": 4, "discount": 1.5}),
    "pre-norm": ("transformer-xl", {"memory": 40, "norm": "pre"}),
    "longspan-gelu": (
        "longspan-xl",
        {"memory": 40, "norm_type": "layer", "biases": True, "activation": "gelu", "log_distances": True},
    ),
    "own-biases": ("transformer-xl", {"memory": 40, "shared_biases": False, "head_width": 5}),
    "adaptive": ("transformer-xl", {"memory": 40, "cutoffs": [7, 15], "div_val": 2, "tie_projections": True}),
    "narrow-embedding": ("transformer-xl", {"memory": 40, "cutoffs": [7], "embedding_width": 12}),
    "longspan": ("longspan-xl", {"memory": 40}),
    "longspan-plain": ("longspan-xl", {"memory": 40, **PAPER}),
    "shaw": ("longspan-xl", {"memory": 40, **PAPER, "position": "shaw"}),
    "shaw-near": ("longspan-xl", {"memory": 7, "same_length": True, **PAPER, "position": "shaw", "max_distance": 3}),
    "regularised": ("longspan-xl", {"memory": 40, "embedding_dropout": 0.2, "projection_dropout": 0.2, "tar": 0.3}),
    "convolution": ("longspan-xl", {"memory": 40, **PAPER, "convolution": 3}),
    "convolution-same-length": ("longspan-xl", {"memory": 6, "same_length": True, "embedding_width": 12}),
    "pointer": ("longspan-xl", {"memory": 40, "pointer": 11, "pointer_width": 6}),
    "rotary": ("rotary", {"memory": 40, "head_width": 6}),
    "rotary-pointer": ("rotary", {"memory": 40, "pointer": 40, "pointer_width": 6, "cutoffs": [7]}),
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
    "xlnet": ("xlnet", {"memory": 40}),
    "elmo": ("elmo", {"inner": None, "filters": [[1, 6], [2, 8]]}),
    "compressive-covering": ("compressive", {"memory": 40, "compressed": 6, "rate": 2}),
}
# Families of other packages. With a memory of 40 positions, those that use one cover every stream of the suite.
WITH_MEMORY |= {
    name: (name, {"memory": 40} if "memory" in family(name).settings else {})
    for name in known_families()
    if name not in BUILT_IN
}
# What a query sees depends on how the stream is cut into segments, so tests of other cuts do not apply to these.
DEPENDS_ON_CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compressive-mean": ("compressive", {"memory": 6, "compressed": 5, "rate": 2, "compression": "mean"}),
    "compressive-convolution": ("compressive", {"memory": 6, "compressed": 5, "rate": 2, "norm": "pre"}),
    "compressive-most-used": ("compressive", {"memory": 6, "compressed": 5, "rate": 2, "compression": "most-used"}),
}
WITHOUT_MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "sinusoid": ("vanilla", {"position": "sinusoid"}),
    "learned": ("vanilla", {"position": "learned", "segment": 40, "max_distance": 39}),
    "vanilla-shaw": ("vanilla", {"position": "shaw", "max_distance": 5}),
    "universal": ("universal", {"layers": 1, "steps": 4}),
    "universal-deep": ("universal", {"layers": 2, "steps": 2, "norm": "pre", "final_norm": True}),
    "evolved": ("evolved", {}),
    "evolved-post": ("evolved", {"norm": "post", "final_norm": False, "activation": "relu"}),
    "al-rfou": (
        "vanilla",
        {"position": "learned", "segment": 40, "max_distance": 39, "layer_losses": True, "targets": 2},
    ),
    "gpt": ("gpt", {"segment": 40, "positions": 40}),
    "gpt-post": ("gpt", {"segment": 40, "positions": 40, "norm": "post"}),
    "bert": ("bert", {"segment": 40, "positions": 40}),
    "reformer": ("reformer", {"chunk": 4, "rounds": 2}),
    "reformer-factored": ("reformer", {"chunk": 3, "rounds": 3, "buckets": 128, "pieces": 3, "segment": 16}),
    "memory-0": ("transformer-xl", {"memory": 0}),
    "convolution-memory-0": ("longspan-xl", {"memory": 0}),
    "vanilla-convolution": ("vanilla", {"position": "shaw", "max_distance": 5, "convolution": 3}),
    "rotary-memory-0": ("rotary", {}),
    "sparse-strided": ("sparse", {"stride": 5, "segment": 40, "max_distance": 39}),
    "sparse-fixed": (
        "sparse",
        {"pattern": "fixed", "stride": 6, "summary": 2, "factorised": "layers", "segment": 40, "max_distance": 39},
    ),
    "longformer": ("longformer", {"window": [9, 12], "dilation": [[1, 2], [1, 3]]}),
    "longformer-global": ("longformer", {"window": 9, "global_tokens": 3}),
    "bigbird": ("bigbird", {"block": 3, "random_blocks": 2, "global_blocks": 1, "segment": 40, "max_distance": 39}),
}
LEARNED_40 = {"learned", "al-rfou", "sparse-strided", "sparse-fixed", "bigbird", "gpt", "gpt-post", "bert"}
"""Those with 40 learned positions; they refuse longer segments."""
# Their training loss has further terms, which other tests check.
OWN_OBJECTIVE = {"xlnet", "bert", "elmo"}
"""They are trained on another objective than the next token."""
MORE_THAN_THE_MEAN = {"al-rfou"} | OWN_OBJECTIVE
SLOW = {"convolution-same-length", "convolution-memory-0", "vanilla-convolution"}
"""Variants of transformer-xl and longspan-xl that run in `make test` and not in `make check`."""
CUT_ANYWHERE = WITH_MEMORY | WITHOUT_MEMORY
ALL = CUT_ANYWHERE | DEPENDS_ON_CUTS

MakeModel = Callable[..., LanguageModel]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make check` runs most variants of transformer-xl and longspan-xl; `make test` runs all families."""
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")  # type: ignore[attr-defined]
        known = isinstance(name, str) and name in ALL
        if known and (name in SLOW or ALL[name][0] not in ("transformer-xl", "longspan-xl")):
            item.add_marker(pytest.mark.slow)


def make_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> LanguageModel:
    """A model with weights so large that every term of every score matters."""
    chosen, values = ALL[name]
    known = {*keys(family(chosen).Config), *READING}
    torch.manual_seed(7)
    model = build(chosen, {k: v for k, v in SMALL.items() if k in known} | values | changes).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        if getattr(model, "pointer", None) is not None:
            model.pointer.bias.fill_(-10.0)  # the pointer gets about as much probability as the vocabulary
    if not model.predicts_next:  # BERT: its hidden states are causal too, so the contract is tested with their logits
        model.predicts_next = True  # type: ignore[misc]
    return model.eval()


@pytest.fixture
def make() -> MakeModel:
    return make_model


def no_dropout(name: str) -> dict[str, float]:
    """All dropout and zoneout rates of a family, set to zero."""
    rates = [key for key in keys(family(ALL[name][0]).Config) if key.endswith(("dropout", "zoneout"))]
    return dict.fromkeys(rates, 0.0)


def stream(batch: int, count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a random text."""
    ids = torch.randint(VOCABULARY, (batch, count + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]
