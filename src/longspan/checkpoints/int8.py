"""Row-wise int8 weights: a quarter of the size of float32, for a model folder that is only read.

A matrix W [R, C] is stored as two tensors of the safetensors file:

    NAME             int8 [R, C]   round(W[r, c] / scale[r])
    NAME.int8_scale  float32 [R]   max_c |W[r, c]| / 127, and 1 for a row of zeros

so W[r, c] is NAME[r, c] * NAME.int8_scale[r], wrong by at most half a scale. A row is an output of a linear layer or
the embedding of a token. Vectors (norms, biases) and tensors of other ranks stay float32. config.json has "dtype":
"int8".
The weights are float32 again as soon as they are loaded. Generation on a CPU rounds them to the same int8 again, and is
faster (`decoding/int8.py`).
"""

from collections.abc import Mapping

import torch

from longspan.errors import CheckpointError
from longspan.shapes import Tensor

DTYPE = "int8"
SCALE = ".int8_scale"


def quantised(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors to store for these weights."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not weight.is_floating_point():
            stored[name] = weight
        elif weight.dim() != 2 or not weight.numel():
            stored[name] = weight.float()
        else:
            stored[name], stored[f"{name}{SCALE}"] = quantise_rows(weight)
    return stored


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values and a float32 scale for every vector along the last axis."""
    wide = weight.detach().double()
    scale = wide.abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1.0).float()
    return (wide / scale[..., None].double()).round().clamp(-127, 127).to(torch.int8), scale


def restored(stored: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The weights as float32. `where` names the file in an error."""
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in stored:
                raise CheckpointError(f"{where} has {name!r:.80} without its matrix; the file is damaged")
            continue
        scale = stored.get(f"{name}{SCALE}")
        if scale is None:
            weights[name] = tensor
            continue
        if tensor.dtype != torch.int8 or scale.dtype != torch.float32 or scale.shape != tensor.shape[:1]:
            raise CheckpointError(f"{where} has {name!r:.80} with a scale that does not fit it; the file is damaged")
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{where} has {name!r:.80} with a scale that is not finite; the file is damaged")
        weights[name] = tensor.float() * scale.view(-1, *[1] * (tensor.dim() - 1))
    return weights
