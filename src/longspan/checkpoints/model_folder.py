"""A MODEL is a folder: config.json, model.safetensors, tokenizer.json, a README card, and the manifest over them.

    {"format": 1, "family": "transformer-xl", "dtype": "float32", "tokens": "bytes", "model": {"layers": 6, ...}}

A checkpoint of a run is such a folder with further files in its manifest, so whatever takes a MODEL takes a
checkpoint, and a RUN too: its best/, or else its newest whole checkpoint.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.manifest import CARD, MANIFEST, Verified, read_json
from longspan.checkpoints.store import CheckpointWarning, Content
from longspan.checkpoints.weights import fill, parse_weights, require_match, save_weights, sketch, weights_of
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError, ConfigError, LongspanError
from longspan.models import families
from longspan.shapes import Tensor
from longspan.tokens import Tokenizer, tokenizer_from_dict

FORMAT = 1
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
PARTS = (CONFIG, WEIGHTS, TOKENIZER)
_ORIGIN = "## Where it comes from"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16)}


@dataclass(frozen=True)
class Loaded:
    """A model ready to read, the tokens it reads, and the hash its states carry; `path` is the folder it came from."""

    model: LanguageModel
    tokenizer: Tokenizer
    hash: str
    path: Path


def save_model(
    path: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    notes: Iterable[str] = (),
    opening: str = "",
    extra: Mapping[str, Content] | None = None,
    replace: bool = False,
) -> str:
    """Write a MODEL folder, whole or not at all, and give its hash; `extra` files join it under the manifest.

    Its card says in `notes` where it comes from and begins with the Markdown of `opening`, whose title it takes.
    """
    described = {
        "format": FORMAT,
        "family": families.name_of(model),
        "dtype": _dtype_name(model),
        "tokens": tokenizer.kind,
        "model": config.plain(model.config),
    }
    files: dict[str, Content] = {
        CONFIG: _json(described),
        TOKENIZER: _json(tokenizer.to_dict()),
        CARD: _card(model, described, tokenizer, notes, opening).encode(),
        WEIGHTS: partial(save_weights, model),
    }
    entries = store.write_folder(path, files | dict(extra or {}), replace=replace)
    return _hash(described, tokenizer, entries[WEIGHTS].sha256)


def load_model(
    path: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model in a MODEL or RUN folder; `overrides` change what needs no other weights (memory, clamp, segment)."""
    return open_model(find_model(path), overrides=overrides, device=device, dtype=dtype)


def find_model(path: Path, keep: Iterable[str] = ()) -> Verified:
    """The MODEL that `path` is or, of a run, its best or newest whole one, verified and read into memory."""
    path, keep = Path(path), (*PARTS, *keep)
    if (path / MANIFEST).exists() or (path / CONFIG).exists():
        return store.read_folder(path, keep)
    if store.locate(path / "best"):
        try:
            return store.read_folder(path / "best", keep)
        except CheckpointError as error:
            warnings.warn(f"best is passed over: {error}", CheckpointWarning, stacklevel=2)
    newest = store.newest_good(path, keep=keep)
    if newest.found:
        return newest.found
    if newest.passed_over:
        first = newest.passed_over[0]
        raise CheckpointError(f"{path} holds no whole checkpoint; of its {len(newest.passed_over)}, {first.reason}")
    return store.read_folder(path, keep)


def open_model(
    verified: Verified,
    *,
    overrides: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model of a folder that `find_model` has read."""
    path = verified.path
    described = _read_config(verified.contents[CONFIG], path)
    try:
        tokenizer = tokenizer_from_dict(read_json(verified.contents[TOKENIZER], str(path / TOKENIZER)))
        stored: Any = config.build(families.family(described["family"]).Config, described["model"], "model")
        tensors = parse_weights(verified.contents[WEIGHTS], str(path / WEIGHTS))
        _require_fit(stored, described, tokenizer, tensors, path)
    except CheckpointError:
        raise
    except LongspanError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None
    values = config.merge(described["model"], overrides or {})
    model = _build(described["family"], values, tensors, path)
    model.to(DTYPES[described["dtype"]])
    fill(model, tensors, str(path / WEIGHTS))
    # On a CPU half the width is hundreds of times slower, so there it is widened unless asked for.
    narrow = described["dtype"] == "bfloat16" and torch.device(device).type == "cpu"
    model.to(device=device, dtype=dtype or (torch.float32 if narrow else None))
    return Loaded(model.eval(), tokenizer, _hash(described, tokenizer, verified.files[WEIGHTS].sha256), path)


def _build(family: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> LanguageModel:
    try:
        require_match(sketch(lambda: families.build(family, values)), tensors, str(path / WEIGHTS))
    except CheckpointError as error:
        raise ConfigError(f"these settings need other weights than the model has: {error}") from None
    # The weights drawn here are all overwritten; whoever resumes a run must not find its random numbers spent.
    with torch.random.fork_rng(devices=[]):
        return families.build(family, values)


def _require_fit(
    stored: Any, described: Mapping[str, Any], tokenizer: Tokenizer, tensors: Mapping[str, Tensor], path: Path
) -> None:
    """The parts belong together: config and tokenizer, config and weights, config and kind of number."""
    # A model of bytes may know fewer tokens than 256, or more; every other tokenizer is made for its model.
    fits = tokenizer.size == stored.vocabulary or tokenizer.kind == "bytes"
    if tokenizer.kind != described["tokens"] or not fits:
        found = f"{tokenizer.kind} of {tokenizer.size} tokens"
        wanted = f"{described['tokens']!r:.40} of {stored.vocabulary}"
        raise CheckpointError(f"{path} has a tokenizer of {found} where its config asks for {wanted}; are they a pair?")
    if getattr(stored, "layers", 0) > len(tensors):
        raise CheckpointError(f"{path} declares {stored.layers} layers and holds {len(tensors)} tensors; it is damaged")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype != DTYPES[described["dtype"]]:
            wanted = described["dtype"]
            raise CheckpointError(f"{path / WEIGHTS} holds {name!r:.80} as {tensor.dtype}, its config says {wanted}")
    expected = sketch(lambda: families.build(described["family"], described["model"]))
    require_match(expected, tensors, str(path / WEIGHTS))


def _read_config(content: bytes, path: Path) -> dict[str, Any]:
    values = read_json(content, str(path / CONFIG))
    if values.get("format") != FORMAT or isinstance(values["format"], bool):
        raise CheckpointError(f"{path} has format {values.get('format')!r:.40}; this longspan reads {FORMAT}")
    kinds = {"family": str, "dtype": str, "tokens": str, "model": dict}
    if set(values) != {"format", *kinds} or not all(isinstance(values[key], kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{path / CONFIG} must hold format, {', '.join(kinds)} and nothing else; it is damaged")
    if values["dtype"] not in DTYPES:
        raise CheckpointError(f"{path} has weights of kind {values['dtype']!r:.40}; longspan reads {', '.join(DTYPES)}")
    return values


def _dtype_name(model: LanguageModel) -> str:
    dtypes = {tensor.dtype for tensor in weights_of(model).values() if tensor.is_floating_point()}
    names = {name for name, dtype in DTYPES.items() if dtype in dtypes}
    if len(dtypes) != 1 or not names:
        kinds = ", ".join(sorted(map(str, dtypes)))
        raise CheckpointError(f"a model is saved in one of {', '.join(DTYPES)}; this one holds {kinds}")
    return names.pop()


def _hash(described: Mapping[str, Any], tokenizer: Tokenizer, weights: str) -> str:
    """The model's name for itself: SHA-256 over weights, architecture and tokenizer."""
    whole = {"family": described["family"], "model": described["model"], "tokens": tokenizer.fingerprint}
    return hashlib.sha256(json.dumps(whole | {"weights": weights}, sort_keys=True).encode()).hexdigest()


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def notes_of(card: str) -> list[str]:
    """What a card says of where its model comes from."""
    section = card.partition(f"{_ORIGIN}\n")[2].partition("\n## ")[0]
    return [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]


def _card(
    model: LanguageModel, described: Mapping[str, Any], tokenizer: Tokenizer, notes: Iterable[str], opening: str
) -> str:
    title = [] if opening.startswith("# ") else [f"# A {described['family']} model", ""]
    lines = [
        *title,
        *([opening.strip(), "", "## What it is", ""] if opening.strip() else []),
        f"- family: {described['family']}",
        f"- parameters: {model.parameter_count:,} ({described['dtype']})",
        f"- tokens: {tokenizer.kind}, {tokenizer.size:,} of them",
        *(f"- {key}: {config.show(value)}" for key, value in described["model"].items()),
        *(["", _ORIGIN, "", *(f"- {note}" for note in notes)] if (notes := list(notes)) else []),
        "",
        "## How to use it",
        "",
        "    longspan info MODEL",
        "    longspan eval MODEL --data FILE",
        '    longspan generate MODEL -p "Once" -n 200',
        "",
        "MODEL is this folder. Every load checks every file but this one, which is yours to edit, against the SHA-256",
        "in manifest.json.",
        "",
    ]
    return "\n".join(lines)
