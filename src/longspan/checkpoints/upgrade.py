"""Upgrades model folders and states of format 1 (longspan 0.1) to format 2.

Format 2 changed three things. The reading settings left the model's config. The family `transformer-xl` was
split into the paper's model, which keeps the name, and our variant, `longspan-xl`. Some tensors were renamed.
"""

import re
from collections.abc import Mapping
from typing import Any

from longspan.contract import State
from longspan.shapes import Tensor

READING = {"segment": "segment", "memory": "memory", "clamp": "clamp", "same_length": "same_length", "copy": "pointer"}
RENAMED = {"copy_width": "pointer_width"}
# The defaults of format 1, for folders that leave a key out.
DEFAULTS = {
    "norm": "post",
    "norm_type": "layer",
    "final_norm": False,
    "activation": "relu",
    "biases": True,
    "qk_norm": False,
    "convolution": 0,
    "shared_biases": True,
    "position": "relative",
    "pointer_width": 0,
    "embedding_dropout": 0.0,
    "projection_dropout": 0.0,
    "ar": 0.0,
    "tar": 0.0,
}
# With these values, and neither input_dropout nor output_dropout, a model is the paper's.
PAPER = {key: value for key, value in DEFAULTS.items() if key not in ("norm", "shared_biases")}
TENSORS = {
    "transformer-xl": (
        (r"\.attention\.(query|key|value|output)\.", r".\1."),
        (r"\.distances\.projection\.", ".position."),
        (r"\.(attention|feed_forward)_residual\.norm\.", r".\1_norm."),
        (r"\.feed_forward\.(up|down)\.", r".\1."),
    ),
    "compressive": ((r"^compressors\.(\d+)\.", r"layers.\1.compressor."),),
}
ALL_FAMILIES = ((r"^convolutions\.(\d+)\.", r"layers.\1.convolution."), (r"^copying\.", "pointer."))
# Tensors of a state: `part.layer` became `layer.field`. `copied` held the two tensors of the pointer's cache, which now
# follows those of the layers.
STATE_FIELDS = {
    "keys": ("keys", "attention.keys"),
    "values": ("values", "attention.values"),
    "hidden": ("hidden", "attention.hidden"),
    "compressed": ("compressed",),
    "tails": ("inputs",),
    "h": ("h",),
    "c": ("c",),
    "x": ("x",),
    "window": ("tokens",),
}
POINTER_FIELDS = {"0": "hidden", "1": "tokens"}


def upgrade_config(family: str, model: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Family, model config and reading of a folder of format 1."""
    reading = {new: model[old] for old, new in READING.items() if old in model}
    values = {RENAMED.get(key, key): value for key, value in model.items() if key not in READING}
    if family != "transformer-xl":
        return family, values, reading
    values = DEFAULTS | values
    is_paper = all(values[key] == value for key, value in PAPER.items())
    if is_paper and not {"input_dropout", "output_dropout"} & set(values):
        if reading.get("pointer") == 0:  # the paper's model has no pointer, so it has no such setting
            del reading["pointer"]
        return family, {key: value for key, value in values.items() if key not in PAPER}, reading
    return "longspan-xl", values, reading


def upgrade_name(family: str, name: str) -> str:
    """The name in format 2 of a tensor of a folder of format 1."""
    for pattern, replacement in (*TENSORS.get(family, ()), *ALL_FAMILIES):
        name = re.sub(pattern, replacement, name)
    return name


def upgrade_state(tensors: Mapping[str, Tensor], full: State) -> dict[str, Tensor]:
    """The tensors of a state of format 1 under the names of format 2. `full` is a full-size state of the same model.

    Tensors without a counterpart keep their names, so that the checks of `restore_state` reject them.
    """
    names = full.tensors()
    upgraded = {}
    for old, tensor in tensors.items():
        part, _, index = old.partition(".")
        if part == "copied" and index in POINTER_FIELDS:
            if not full.reading.pointer:  # a model loaded with its pointer off ignores the pointer's cache
                continue
            candidates = [f"{len(full.caches) - 1}.{POINTER_FIELDS[index]}"]
        else:
            candidates = [f"{index}.{field}" for field in STATE_FIELDS.get(part, ())]
        new = next((name for name in candidates if name in names), old)
        upgraded[new] = tensor[..., None] if part == "window" else tensor
    # Format 1 left out tensors that have no elements in any state, for example the inputs of a QRNN with a window of 1.
    rows = tensors["length"].numel() if "length" in tensors else 0
    empty = {name: like.new_zeros(rows, *like.shape[1:]) for name, like in names.items() if not like.numel()}
    return empty | upgraded
