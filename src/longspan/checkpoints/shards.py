"""A checkpoint in shards, as several processes write it (`training/sharded_save.py`).

A shard is a safetensors file with one process's parts of the tensors, and their offsets in its metadata. The name of a
tensor starts with the file that a single process would have written it to, `model.safetensors/head.bias`, so shards are
read like those files.
"""

import json
import math
from pathlib import Path

import torch

from longspan.checkpoints.manifest import SHARD, Verified, read_json
from longspan.checkpoints.weights import parse_weights
from longspan.errors import CheckpointError
from longspan.shapes import Tensor

OFFSETS = "DCP_SHARDING_INFO"


def read_tensors(verified: Verified, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file of a folder, or those with its name in the folder's shards."""
    if name in verified.contents:
        return parse_weights(verified.contents[name], str(verified.path / name))
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for shard, content in verified.contents.items():
        if SHARD.fullmatch(shard):
            _read_parts(content, f"{name}/", str(verified.path / shard), parts)
    return {tensor: _joined(tensor, pieces, verified.path) for tensor, pieces in parts.items()}


def _read_parts(content: bytes, prefix: str, where: str, parts: dict[str, list[tuple[list[int], Tensor]]]) -> None:
    tensors = parse_weights(content, where)
    header = read_json(content[8 : 8 + int.from_bytes(content[:8], "little")], where)
    try:
        offsets = json.loads(header["__metadata__"][OFFSETS])
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                place = [int(offset) for offset in offsets[name]["saved_offsets"]]
                parts.setdefault(name.removeprefix(prefix), []).append((place, tensor))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{where} does not say which parts of tensors it has; it is damaged") from None


def _joined(name: str, pieces: list[tuple[list[int], Tensor]], path: Path) -> Tensor:
    """A tensor from its parts, which must fill it exactly."""
    first = pieces[0][1]
    fits = all(len(place) == part.dim() == first.dim() and min(place, default=0) >= 0 for place, part in pieces)
    ends = zip(*([o + n for o, n in zip(place, part.shape, strict=False)] for place, part in pieces), strict=False)
    shape = [max(axis) for axis in ends]
    if not fits or math.prod(shape) != sum(part.numel() for _, part in pieces):
        raise CheckpointError(
            f"the shards of {path} have parts of {name!r:.80} that do not fit together; it is damaged"
        )
    whole = torch.empty(shape, dtype=first.dtype)
    for place, part in pieces:
        whole[tuple(slice(o, o + n) for o, n in zip(place, part.shape, strict=True))] = part
    return whole
