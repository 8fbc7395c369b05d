"""A model's tensors by name, as a safetensors file: tied tensors stored once, names and shapes checked on load."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from longspan.errors import CheckpointError
from longspan.shapes import Tensor

MISMATCH = "the files are from different models; use a matching pair"


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
        raise CheckpointError(f"no model can be built from this config ({first:.100}); it is damaged") from None


def fill(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into the model. A tensor that is missing, extra or of another shape is an error."""
    copy_into(weights_of(model), tensors, where)


def copy_into(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors into others of the same names and shapes. Of a sharded one, the own part is copied."""
    require_match(expected, tensors, where)
    with torch.no_grad():
        for name, target in expected.items():
            local(target).copy_(part_like(tensors[name], target))


def local(tensor: Tensor) -> Tensor:
    """The part of this process of a sharded tensor (a DTensor); other tensors as they are. Shares memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Tensor) -> Tensor:
    """A sharded tensor as a whole, which all processes must ask for; other tensors as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded_like(own: Tensor, sharded: Any) -> Tensor:
    """The part of this process of a tensor that is sharded like another one; a scalar is the same everywhere."""
    if not hasattr(sharded, "to_local") or not own.dim():
        return own
    from torch.distributed.tensor import DTensor

    form = {"shape": sharded.shape, "stride": sharded.stride(), "run_check": False}
    return DTensor.from_local(own, sharded.device_mesh, sharded.placements, **form)


def part_like(whole: Tensor, sharded: Any) -> Tensor:
    """The part of a complete tensor that this process has of a sharded one."""
    if not hasattr(sharded, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    moved = whole.to(sharded.device)
    return distribute_tensor(moved, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()


def require_match(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Names, shapes and kinds (float or integer) of `tensors` are those of `expected`; `where` names the file."""
    if missing := sorted(set(expected) - set(tensors)):
        raise CheckpointError(f"{where} has no {missing[0]!r}, which its config needs; {MISMATCH}")
    if extra := sorted(set(tensors) - set(expected)):
        raise CheckpointError(f"{where} has {extra[0]!r:.80}, which its config does not have; {MISMATCH}")
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape:
            shapes = f"{list(found.shape)}, its config needs {list(wanted.shape)}"
            raise CheckpointError(f"{where} has {name!r} of shape {shapes}; {MISMATCH}")
        if found.is_floating_point() != wanted.is_floating_point():
            raise CheckpointError(f"{where} has {name!r} as {found.dtype}, not {wanted.dtype}; the file is damaged")


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights on the CPU, to be written. With sharded weights all processes must ask for them."""
    return {name: full(tensor.detach()).cpu().contiguous() for name, tensor in weights_of(model).items()}


def parse_weights(content: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that is already in memory."""
    try:
        return load(content)
    # What safetensors raises for truncated, nested or false headers, and for dtypes that torch does not have.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where} is not a valid safetensors file ({error!s:.100}); it is damaged") from None
