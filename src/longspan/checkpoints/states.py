"""A state as a file, to continue a stream later.

It is a safetensors file. Its metadata has the format, the hash of the model, the reading and a SHA-256 of the contents,
since safetensors has no checksum. The tensors of the state have the prefix `state.`, those a caller adds `extra.`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from longspan import config
from longspan.cache import TokenWindow
from longspan.checkpoints.manifest import read_json, reason
from longspan.checkpoints.store import write_file
from longspan.checkpoints.upgrade import upgrade_state
from longspan.checkpoints.weights import parse_weights
from longspan.contract import LanguageModel, State
from longspan.errors import CheckpointError, ConfigError, StateError
from longspan.reading import Reading
from longspan.shapes import Tensor
from longspan.tree import map_tensors, named_tensors

FORMAT = 2
KEY = "longspan"
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def save_state(path: Path, state: State, *, model_hash: str, extra: Mapping[str, Tensor] | None = None) -> None:
    """Write `state` atomically; only the model with that hash can load it."""
    write_file(path, encode_state(state, model_hash=model_hash, extra=extra))


def encode_state(state: State, *, model_hash: str, extra: Mapping[str, Tensor] | None = None) -> bytes:
    """The contents of a state file."""
    named = {f"state.{name}": tensor for name, tensor in state.tensors().items()}
    named |= {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}
    # Cloned, because rows of one state may share memory, which safetensors refuses; into default strides, because a
    # tensor of one element counts as contiguous with any strides.
    tensors = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in named.items()}
    about = {"format": FORMAT, "model": model_hash, "reading": config.plain(state.reading)}
    about |= {"sha256": _digest(about, tensors)}
    return save(tensors, {KEY: json.dumps(about)})


def load_state(path: Path, model: LanguageModel, *, model_hash: str) -> tuple[State, dict[str, Tensor]]:
    """The state in `path`, on the model's device and in its dtype, and the extra tensors saved with it.

    A state of format 1 (longspan 0.1) does not have a reading; the model's own is used, as longspan 0.1 did.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no state file {path}; check the name") from None
    except OSError as error:
        raise CheckpointError(f"the state {path} cannot be read: {reason(error)}") from None
    return decode_state(content, path, model, model_hash=model_hash)


def model_of_state(content: bytes, path: Path) -> str:
    """The hash of the model that a state file was saved with. The rest of the file is not checked."""
    return str(_read_about(content, path).get("model"))


def decode_state(
    content: bytes, path: Path, model: LanguageModel, *, model_hash: str
) -> tuple[State, dict[str, Tensor]]:
    """`load_state` of the contents of a file; `path` is its name in errors."""
    tensors = parse_weights(content, f"the state {path}")
    about = _read_about(content, path)
    found = about.get("format")
    if found not in (1, FORMAT) or isinstance(found, bool):
        raise CheckpointError(
            f"the state {path} has format {found!r:.40}; this version of longspan reads formats 1 and {FORMAT}"
        )
    if about.get("sha256") != _digest({key: about[key] for key in about if key != "sha256"}, tensors):
        raise CheckpointError(
            f"the state {path} does not match its SHA-256; it was modified or damaged, so use another copy"
        )
    if about.get("model") != model_hash:
        raise StateError(
            f"the state {path} belongs to model {str(about.get('model'))[:12]}, but this is model "
            f"{model_hash[:12]}; load the model it was saved with, or start without a state"
        )
    inner = {name.removeprefix("state."): tensor for name, tensor in tensors.items() if name.startswith("state.")}
    extra = {name.removeprefix("extra."): t for name, t in tensors.items() if name.startswith("extra.")}
    try:
        if found == 1:
            return restore_state(model, _upgraded(model, inner), model.reading), extra
        if not isinstance(about.get("reading"), dict):
            raise ConfigError("its reading is missing")
        return restore_state(model, inner, config.build(Reading, about["reading"], "reading")), extra
    except (ConfigError, StateError) as error:
        raise CheckpointError(f"the state {path} cannot be used: {error}") from None


def restore_state(
    model: LanguageModel, tensors: Mapping[str, Tensor], reading: Reading, *, convert: bool = True
) -> State:
    """The state of a model from its tensors. Names, shapes, dtypes, lengths and values are checked; a state that the
    model could not have produced is a StateError. `convert` moves it to the model's device and dtype."""
    forms = _forms(model, reading)
    like, full = next((pair for pair in forms if set(pair[0].tensors()) == set(tensors)), (None, None))
    if like is None or full is None:
        needed = sorted(forms[0][0].tensors())
        raise StateError(f"it has tensors {sorted(tensors)!s:.200}; this model needs for example {needed!s:.200}")
    length = tensors["length"]
    if length.dtype != torch.int64 or length.dim() != 1 or not len(length):
        raise StateError(
            f"its 'length' has dtype {length.dtype} and shape {list(length.shape)}; it must be int64, [rows]"
        )
    wanted, largest = like.tensors(), full.tensors()
    # A token window has tokens as they are; a pointer cache has tokens plus one.
    is_window = any(isinstance(cache, TokenWindow) for cache in like.caches)
    last_token = model.config.vocabulary - (1 if is_window else 0)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, wanted[name], largest[name], len(length), last_token)
    fitted = {
        name: tensor.to(wanted[name].device, wanted[name].dtype) if convert else tensor
        for name, tensor in tensors.items()
    }
    names = iter(wanted)
    length = fitted[next(names)]
    caches = map_tensors(lambda _: fitted[next(names)], like.caches)
    state = replace(like, caches=caches, length=length, full=False)
    _check_positions(state, full)
    return state


def _forms(model: LanguageModel, reading: Reading) -> list[tuple[State, State]]:
    """Every form of state that this model can have (for decoding, for training, the token window of a decoder), one row
    each: empty, and of full size."""
    forms = []
    for trainable in (False, True):
        empty, full = (model.initial_state(1, reading, trainable=trainable, filled=filled) for filled in (False, True))
        forms.append((empty, full))
    length = forms[0][0].length
    empty, full = (State((TokenWindow(length.new_zeros(1, n, 1)),), length, reading) for n in (0, reading.segment))
    return [*forms, (empty, full)]


def _upgraded(model: LanguageModel, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a state of format 1 under the names of the form that has them all; else unchanged."""
    for _, full in _forms(model, model.reading):
        upgraded = upgrade_state(tensors, full)
        if set(upgraded) == set(full.tensors()):
            return upgraded
    return tensors


def _check_tensor(name: str, given: Tensor, like: Tensor, full: Tensor, rows: int, last_token: int) -> None:
    """The number of rows is `rows`, the number of positions is free where it grows, other sizes are the model's. Floats
    are finite, tokens are in the vocabulary."""
    sizes: list[int | None] = [rows, *like.shape[1:]]
    if like.shape != full.shape:
        sizes[-2] = None
    fits = given.dim() == like.dim() and all(size in (None, got) for size, got in zip(sizes, given.shape, strict=True))
    floats = given.dtype in FLOATS and like.dtype in FLOATS
    if not fits or not (floats or given.dtype == like.dtype):
        shape = ", ".join("positions" if size is None else str(size) for size in sizes)
        raise StateError(
            f"its {name!r} has dtype {given.dtype} and shape {list(given.shape)}; "
            f"this model needs {like.dtype} and [{shape}]"
        )
    if floats and not bool(given.isfinite().all()):
        raise StateError(f"its {name!r} has values that are not finite")
    if not floats and name != "length" and given.numel():
        least, most = (int(edge) for edge in given.aminmax())
        if least < 0 or most > last_token:
            raise StateError(f"its {name!r} has tokens {least} to {most}; they must be between 0 and {last_token}")


def _check_positions(state: State, full: State) -> None:
    """Layers with equal limits have equally many positions; no row has more valid positions than the caches have."""
    held, limits = ([getattr(cache, "positions", 0) for cache in one.caches] for one in (state, full))
    for limit in set(limits):
        counts = {count for count, own in zip(held, limits, strict=True) if own == limit}
        if len(counts) > 1:
            raise StateError(f"its layers have {sorted(counts)} positions; they must be equal")
    sizes = [{t.shape[-2] for _, t in named_tensors(cache) if t.dim() == 4} for cache in state.caches]
    for own in sizes:
        if len(own) > 1:
            raise StateError(f"its keys and values have {sorted(own)} positions; they must be equal")
    least, most, positions = int(state.length.min()), int(state.length.max()), max(held, default=0)
    if least < 0 or most > positions:
        raise StateError(f"its rows have {least} to {most} valid positions, but its caches have {positions}")


def _read_about(content: bytes, path: Path) -> dict[str, Any]:
    """The metadata, which `safetensors.torch.load` does not return. A file starts with the header's length and the
    header, in JSON."""
    header = read_json(content[8 : 8 + int.from_bytes(content[:8], "little")], f"the header of {path}")
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or KEY not in metadata:
        raise CheckpointError(
            f"{path} is not a longspan state file; use a file written by save_session or generate --save-state"
        )
    return read_json(metadata[KEY].encode(), f"the metadata of {path}")


def _digest(about: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over metadata and the tensors' names, dtypes, shapes and values."""

    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
