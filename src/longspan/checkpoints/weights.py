"""A model's tensors by name: each shared one once, and on the way back every one exactly as expected."""

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
    """Parameters and lasting buffers; a tensor that two parts share comes under the first of its names."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def sketch(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The names and shapes a model would have, without its memory: a damaged config may ask for any amount."""
    try:
        with torch.device("meta"):
            return weights_of(build())
    except (RuntimeError, OverflowError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"a model of these settings cannot be built ({first:.100}); they are damaged") from None


def fill(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into the model; one that is missing, extra or of another shape is an error."""
    expected = weights_of(model)
    require_match(expected, tensors, where)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def require_match(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    if missing := sorted(set(expected) - set(tensors)):
        raise CheckpointError(f"{where} lacks {missing[0]!r}, which its config asks for; are the two a pair?")
    if extra := sorted(set(tensors) - set(expected)):
        raise CheckpointError(f"{where} holds {extra[0]!r:.80}, which its config has no place for; are the two a pair?")
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape:
            shapes = f"{list(found.shape)} where its config asks for {list(wanted.shape)}"
            raise CheckpointError(f"{where} holds {name!r} of shape {shapes}; are the two a pair?")
        if found.is_floating_point() != wanted.is_floating_point():
            raise CheckpointError(f"{where} holds {name!r} as {found.dtype}, which no weight is; the file is damaged")


def save_weights(model: nn.Module, path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights_of(model).items()}
    save_safetensors(tensors, path)


def parse_weights(content: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that is already in memory."""
    try:
        return load(content)
    # What the reader raises for headers that are cut, nested or lie, and for kinds of numbers torch does not have.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where} is not readable safetensors ({error!s:.100}); the file is damaged") from None
