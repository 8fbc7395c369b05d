"""Every family under the contract, by name."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from longspan import config
from longspan.contract import LanguageModel
from longspan.errors import ConfigError, UnknownNameError
from longspan.models.adaptive_span import AdaptiveSpanTransformer
from longspan.models.awd_lstm import AWDLSTM
from longspan.models.bigbird import BigBird
from longspan.models.compressive import Compressive
from longspan.models.evolved import Evolved
from longspan.models.longformer import Longformer
from longspan.models.lstm import LSTM
from longspan.models.qrnn import QRNN
from longspan.models.reformer import Reformer
from longspan.models.rotary import Rotary
from longspan.models.sparse import Sparse
from longspan.models.transformer_xl import TransformerXL
from longspan.models.universal import Universal
from longspan.models.vanilla import Vanilla

FAMILIES: dict[str, type[LanguageModel]] = {
    "reformer": Reformer,
    "transformer-xl": TransformerXL,
    "vanilla": Vanilla,
    "rotary": Rotary,
    "lstm": LSTM,
    "awd-lstm": AWDLSTM,
    "qrnn": QRNN,
    "compressive": Compressive,
    "adaptive-span": AdaptiveSpanTransformer,
    "universal": Universal,
    "evolved": Evolved,
    "sparse": Sparse,
    "longformer": Longformer,
    "bigbird": BigBird,
}


def family(name: str) -> type[LanguageModel]:
    if name not in FAMILIES:
        raise UnknownNameError("family", name, FAMILIES)
    return FAMILIES[name]


def name_of(model: LanguageModel) -> str:
    return next(name for name, cls in FAMILIES.items() if type(model) is cls)


def build(name: str, values: Mapping[str, Any]) -> LanguageModel:
    """A model of that family with fresh weights; `values` are the keys of its config."""
    return create(name, config.build(family(name).Config, values, "model"))


def create(name: str, made: Any) -> LanguageModel:
    """The model of a config that was checked already, if this machine can hold it."""
    size, room = 4 * made.rough_parameters(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > room and torch.get_default_device().type != "meta":
        raise ConfigError(
            f"a model of this shape needs {size / 2**30:,.0f} GiB and this machine has {room / 2**30:,.0f}; "
            "make it smaller"
        )
    return family(name)(made)


def outline(name: str, made: Any) -> LanguageModel:
    """The model of a config without its memory: what can be counted and asked, but not run."""
    with torch.device("meta"):
        return create(name, made)
