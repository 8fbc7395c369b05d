"""Every family under the contract, by name."""

from collections.abc import Mapping
from typing import Any

from longspan import config
from longspan.contract import LanguageModel
from longspan.errors import UnknownNameError
from longspan.models.transformer_xl import TransformerXL
from longspan.models.vanilla import Vanilla

FAMILIES: dict[str, type[LanguageModel]] = {
    "transformer-xl": TransformerXL,
    "vanilla": Vanilla,
}


def family(name: str) -> type[LanguageModel]:
    if name not in FAMILIES:
        raise UnknownNameError("family", name, FAMILIES)
    return FAMILIES[name]


def name_of(model: LanguageModel) -> str:
    return next(name for name, cls in FAMILIES.items() if type(model) is cls)


def build(name: str, values: Mapping[str, Any]) -> LanguageModel:
    """A model of that family with fresh weights; `values` are the keys of its config."""
    cls = family(name)
    return cls(config.build(cls.Config, values, "model"))
