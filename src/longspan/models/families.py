"""Model families by name. Those of other packages register under the entry point group `longspan.families`."""

import importlib
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from longspan import config
from longspan.contract import LanguageModel
from longspan.errors import ConfigError, UnknownNameError
from longspan.reading import Reading

GROUP = "longspan.families"
BUILT_IN = {
    "transformer-xl": "longspan.models.transformer_xl:TransformerXL",
    "longspan-xl": "longspan.models.longspan_xl:LongspanXL",
    "xlnet": "longspan.models.xlnet:XLNet",
    "bert": "longspan.models.bert:BERT",
    "elmo": "longspan.models.elmo:ELMo",
    "gpt": "longspan.models.gpt:GPT",
    "vanilla": "longspan.models.vanilla:Vanilla",
    "rotary": "longspan.models.rotary:Rotary",
    "compressive": "longspan.models.compressive:Compressive",
    "adaptive-span": "longspan.models.adaptive_span:AdaptiveSpanTransformer",
    "longformer": "longspan.models.longformer:Longformer",
    "sparse": "longspan.models.sparse:Sparse",
    "bigbird": "longspan.models.bigbird:BigBird",
    "reformer": "longspan.models.reformer:Reformer",
    "universal": "longspan.models.universal:Universal",
    "evolved": "longspan.models.evolved:Evolved",
    "lstm": "longspan.models.lstm:LSTM",
    "awd-lstm": "longspan.models.awd_lstm:AWDLSTM",
    "qrnn": "longspan.models.qrnn:QRNN",
}

WRAPPERS = {"task": "longspan.transfer.model:TaskModel"}
"""Models around a model of a family. They are stored like one, but they are not architectures to choose."""


@cache
def known_families() -> dict[str, str]:
    """Every family as `module:class`, built in or registered; a built-in name cannot be replaced."""
    registered: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        if registered.get(entry.name, entry.value) != entry.value or entry.name in BUILT_IN:
            warnings.warn(
                f"the family {entry.name!r} ({entry.value}) is ignored, because another family has this name",
                stacklevel=2,
            )
        else:
            registered[entry.name] = entry.value
    return registered | BUILT_IN


def family(name: str) -> type[LanguageModel]:
    known = known_families() | WRAPPERS
    if name not in known:
        raise UnknownNameError("family", name, known_families(), otherwise="or install the package that registers it")
    module, _, attribute = known[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the family {name!r} is registered as {known[name]} but cannot be imported: {error}"
        ) from None
    return found


@dataclass(frozen=True)
class Summary:
    """A family in one line: what it is, and whether it has a memory across segments."""

    description: str
    memory: str


def summary(name: str) -> Summary:
    """The first line of the family's module, and its memory: always, never, or `reading.memory` and its default."""
    cls = family(name)
    lines = (sys.modules[cls.__module__].__doc__ or "").splitlines()
    model = outline(name, cls.Config())
    memory = "memory" if model.has_memory() else "no memory"
    if "memory" in model.settings:
        memory = f"memory, default {model.reading.memory}"
    return Summary(lines[0] if lines else "", memory)


def defaults() -> dict[str, dict[str, Any]]:
    """Every key of a config with its default in each family that has it, by key and family."""
    found: dict[str, dict[str, Any]] = {}
    for name in known_families():
        for key, value in config.keys(family(name).Config).items():
            found.setdefault(key, {})[name] = value
    return found


def name_of(model: LanguageModel) -> str:
    """The name that a model's class is registered under. Only families whose module is loaded are compared, so that no
    other one is imported."""
    # FSDP makes a subclass of the class of a model.
    cls = next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))
    for name, value in (known_families() | WRAPPERS).items():
        module, _, attribute = value.partition(":")
        if getattr(sys.modules.get(module), attribute, None) is cls:
            return name
    raise ConfigError(
        f"{cls.__qualname__} of {cls.__module__} is not a registered family; see `longspan docs contributing`"
    )


def build(name: str, values: Mapping[str, Any], reading: Reading | None = None) -> LanguageModel:
    """A model of that family with new weights; `values` are the keys of its config."""
    return create(name, config.build(family(name).Config, values, "model"), reading)


def create(name: str, made: Any, reading: Reading | None = None) -> LanguageModel:
    """The model of a valid config, if it fits into the memory of this machine."""
    if torch.get_default_device().type != "meta":
        size = 4 * outline(name, made).parameter_count
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > available:
            raise ConfigError(
                f"a model of this shape needs {size / 2**30:,.0f} GiB, but this machine has "
                f"{available / 2**30:,.0f}; lower model.layers, model.width or model.vocabulary"
            )
    model = family(name)(made)
    if reading is not None:
        model.check_reading(reading)
        model.reading = reading
    return model


def outline(name: str, made: Any, reading: Reading | None = None) -> LanguageModel:
    """The model without weights, on the meta device: for counts and sizes."""
    with torch.device("meta"):
        return create(name, made, reading)


def state_bytes(model: LanguageModel, reading: Reading | None = None) -> int:
    """Size of a full state of one row for decoding. The state of an `outline` is not allocated."""
    return model.initial_state(1, reading, filled=True, trainable=False).nbytes_per_row()
