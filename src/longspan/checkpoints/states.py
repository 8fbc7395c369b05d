"""A model's state in one file: what it has read so far, to go on from later.

One safetensors file whose metadata names the format, the model and a SHA-256 of the contents, since safetensors has no
checksum of its own. The state's tensors are under `state.`, what a caller keeps beside it under `extra.`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from longspan.checkpoints.manifest import read_json, reason
from longspan.checkpoints.store import write_file
from longspan.checkpoints.weights import parse_weights
from longspan.contract import State
from longspan.errors import CheckpointError, StateError
from longspan.shapes import Tensor

FORMAT = 1
KEY = "longspan"


def save_state(path: Path, state: State, *, model_hash: str, extra: Mapping[str, Tensor] | None = None) -> None:
    """Write `state`, whole or not at all; only the model of that hash will take it back."""
    named = {f"state.{name}": tensor for name, tensor in state.tensors().items()}
    named |= {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}
    # Cloned, because rows of one state may share memory, which safetensors refuses; into plain strides, because a
    # tensor of one element counts as contiguous with any.
    tensors = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in named.items()}
    about = {"format": FORMAT, "model": model_hash, "version": state.version}
    about |= {"sha256": _digest(about, tensors)}
    write_file(path, save(tensors, {KEY: json.dumps(about)}))


def load_state(path: Path, *, model_hash: str) -> tuple[State, dict[str, Tensor]]:
    """The state in `path` and what was kept beside it, if this model wrote it and nothing has changed since."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no state file {path}; check the name") from None
    except OSError as error:
        raise CheckpointError(f"the state {path} cannot be read: {reason(error)}") from None
    tensors = parse_weights(content, f"the state {path}")
    about = _read_about(content, path)
    if about.get("format") != FORMAT:
        raise CheckpointError(f"the state {path} has format {about.get('format')!r:.40}; this longspan reads {FORMAT}")
    if about.get("sha256") != _digest({key: about[key] for key in about if key != "sha256"}, tensors):
        raise CheckpointError(f"the state {path} does not match its SHA-256; it was altered or damaged")
    if about.get("model") != model_hash:
        raise StateError(
            f"the state {path} belongs to model {str(about.get('model'))[:12]}, this is model {model_hash[:12]}; "
            "load the model it was saved with, or start without it"
        )
    inner = {name.removeprefix("state."): tensor for name, tensor in tensors.items() if name.startswith("state.")}
    try:
        state = State.from_tensors(inner, about.get("version"))
    except StateError as error:
        raise CheckpointError(f"the state {path} cannot be used: {error}") from None
    return state, {name.removeprefix("extra."): t for name, t in tensors.items() if name.startswith("extra.")}


def _read_about(content: bytes, path: Path) -> dict[str, Any]:
    """The metadata, which `safetensors.torch.load` does not hand out: a length, then a JSON header that holds it."""
    header = read_json(content[8 : 8 + int.from_bytes(content[:8], "little")], f"the header of {path}")
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or KEY not in metadata:
        raise CheckpointError(f"{path} is no state file of longspan; save one with generate --save-state")
    return read_json(metadata[KEY].encode(), f"the metadata of {path}")


def _digest(about: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over everything a reader uses: metadata, names, kinds, shapes and numbers."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
