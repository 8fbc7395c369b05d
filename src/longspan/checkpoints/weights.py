"""A model's tensors by name, as a safetensors file: tied tensors stored once, names and shapes checked on load."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save_file as save_safetensors
from torch import nn

from longspan.errors import CheckpointError
from longspan.shapes import Tensor


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers. A tied tensor appears once, under its first name."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def meta_weights(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The names and shapes of a model's tensors, on the meta device: a damaged config could ask for any amount of
    memory."""
    try:
        with torch.device("meta"):
            return weights_of(build())
    except (RuntimeError, OverflowError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"this config cannot be built ({first:.100}); it is damaged") from None


def fill(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into the model. A tensor that is missing, extra or of another shape is an error."""
    expected = weights_of(model)
    require_match(expected, tensors, where)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def require_match(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Names, shapes and kinds (float or integer) of `tensors` are those of `expected`; `where` names the file."""
    if missing := sorted(set(expected) - set(tensors)):
        raise CheckpointError(f"{where} lacks {missing[0]!r}, which its config needs; do they belong together?")
    if extra := sorted(set(tensors) - set(expected)):
        raise CheckpointError(f"{where} has {extra[0]!r:.80}, which its config does not; do they belong together?")
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape:
            shapes = f"{list(found.shape)}, its config needs {list(wanted.shape)}"
            raise CheckpointError(f"{where} has {name!r} of shape {shapes}; do they belong together?")
        if found.is_floating_point() != wanted.is_floating_point():
            raise CheckpointError(f"{where} has {name!r} as {found.dtype}, not {wanted.dtype}; the file is damaged")


def save_weights(model: nn.Module, path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights_of(model).items()}
    save_safetensors(tensors, path)


def parse_weights(content: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that is already in memory."""
    try:
        return load(content)
    # What safetensors raises for truncated, nested or false headers, and for dtypes that torch does not have.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where} is not a valid safetensors file ({error!s:.100}); it is damaged") from None
