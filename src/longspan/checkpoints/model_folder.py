"""A MODEL is a folder with config.json, model.safetensors, tokenizer.json, a README card and a manifest. config.json:

    {"format": 2, "family": "transformer-xl", "dtype": "float32", "tokenizer": "bytes",
     "model": {"layers": 6, ...}, "reading": {"segment": 128, "memory": 128, ...}}

`model` determines the weights; `reading` is how the model is read by default. Format 1 (longspan 0.1) is upgraded on
load.

A checkpoint of a run is a MODEL with more files in its manifest, so a command that takes a MODEL takes a checkpoint.
The folder of a run works too: best/ is used or, without one, the newest undamaged checkpoint.
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
from safetensors.torch import save_file

from longspan import config
from longspan.checkpoints import store
from longspan.checkpoints.int8 import DTYPE, quantised, restored
from longspan.checkpoints.manifest import CARD, MANIFEST, SHARD, Entry, Verified, read_json
from longspan.checkpoints.shards import read_tensors
from longspan.checkpoints.store import CheckpointWarning, Content
from longspan.checkpoints.upgrade import upgrade_config, upgrade_name
from longspan.checkpoints.weights import MISMATCH, fill, full_weights, meta_weights, require_match, weights_of
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError, ConfigError, LongspanError, UnknownNameError, counted
from longspan.models import families
from longspan.reading import Reading
from longspan.shapes import Tensor
from longspan.tokenizers import Tokenizer, tokenizer_from_dict

FORMAT = 2
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
PARTS = (CONFIG, WEIGHTS, TOKENIZER)
_ORIGIN = "## Where it comes from"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16)}


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its tokenizer, the hash that its saved states carry, and the folder it was loaded from."""

    model: LanguageModel
    tokenizer: Tokenizer
    hash: str
    path: Path
    int8: bool = False
    """The matrices are stored as int8."""


def save_model(
    path: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    notes: Iterable[str] = (),
    opening: str = "",
    extra: Mapping[str, Content] | None = None,
    replace: bool = False,
    weights: Mapping[str, Tensor] | None = None,
    int8: bool = False,
) -> str:
    """Write a MODEL folder atomically and return its hash. `extra` files are added to the folder and its manifest.
    `int8` stores matrices as int8 (`checkpoints/int8.py`).

    The card starts with the Markdown in `opening`, title included; `notes` say where the model comes from.
    """
    tensors = dict(weights or full_weights(model))
    dtype = DTYPE if int8 else None
    files: dict[str, Content] = {
        **description(model, tokenizer, notes=notes, opening=opening, dtype=dtype),
        WEIGHTS: partial(save_file, quantised(tensors) if int8 else tensors),
    }
    entries = store.write_folder(path, files | dict(extra or {}), replace=replace)
    identity = {"family": families.name_of(model), "model": config.plain(model.config)}
    return _hash(identity, tokenizer, entries)


def description(
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    notes: Iterable[str] = (),
    opening: str = "",
    dtype: str | None = None,
) -> dict[str, bytes]:
    """The files of a MODEL folder except its weights. `dtype` is that of the file, by default that of the model."""
    described = {
        "format": FORMAT,
        "family": families.name_of(model),
        "dtype": dtype or _dtype_name(model),
        "tokenizer": tokenizer.kind,
        "model": config.plain(model.config),
        "reading": reading_of(model),
    }
    return {
        CONFIG: _json(described),
        TOKENIZER: _json(tokenizer.to_dict()),
        CARD: _card(model, described, tokenizer, notes, opening).encode(),
    }


def load_model(
    path: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model in the folder of a MODEL or a run. `overrides` change its reading (memory, clamp, segment, ...)."""
    return open_model(find_model(path), overrides=overrides, device=device, dtype=dtype)


def find_model(path: Path, keep: Iterable[str] = ()) -> Verified:
    """The MODEL at `path`, or the best or newest undamaged one of a run, verified and read into memory."""
    path, keep = Path(path), (*PARTS, *keep)
    if (path / MANIFEST).exists() or (path / CONFIG).exists():
        return store.read_folder(path, keep)
    if store.locate(path / "best"):
        try:
            return store.read_folder(path / "best", keep)
        except CheckpointError as error:
            warnings.warn(f"skipped best: {error}", CheckpointWarning, stacklevel=2)
    newest = store.newest_good(path, keep=keep)
    if newest.found:
        return newest.found
    if newest.passed_over:
        first = newest.passed_over[0]
        count = len(newest.passed_over)
        raise CheckpointError(f"{path} has no undamaged checkpoint; the newest of {count} is damaged: {first.reason}")
    return store.read_folder(path, keep)


def open_model(
    verified: Verified,
    *,
    overrides: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model of a folder that `find_model` has verified."""
    path = verified.path
    described = _read_config(verified.contents[CONFIG], path)
    try:
        tokenizer = tokenizer_from_dict(read_json(verified.contents[TOKENIZER], str(path / TOKENIZER)))
        stored: Any = config.build(families.family(described["family"]).Config, described["model"], "model")
        tensors = read_tensors(verified, WEIGHTS)
        if described["format"] == 1:
            tensors = {upgrade_name(described["family"], name): tensor for name, tensor in tensors.items()}
        int8 = described["dtype"] == DTYPE
        if int8:
            described["dtype"], tensors = "float32", restored(tensors, str(path / WEIGHTS))
        stored_reading = _read_reading(described, path)
        _require_fit(stored, stored_reading, described, tokenizer, tensors, path)
    except CheckpointError:
        raise
    except LongspanError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None
    reading = override(described["family"], stored_reading, overrides or {})
    # All weights drawn here are overwritten. Loading must not consume random numbers, or a resumed run would differ.
    with torch.random.fork_rng(devices=[]):
        model = families.create(described["family"], stored, reading)
    model.to(DTYPES[described["dtype"]])
    fill(model, tensors, str(path / WEIGHTS))
    # bfloat16 is hundreds of times slower on a CPU, so it is converted to float32 there unless a dtype is given.
    widen = described["dtype"] == "bfloat16" and torch.device(device).type == "cpu"
    model.to(device=device, dtype=dtype or (torch.float32 if widen else None))
    digest = _hash(described["identity"], tokenizer, verified.files)
    return Loaded(model.eval(), tokenizer, digest, path, int8)


def reading_of(model: LanguageModel) -> dict[str, Any]:
    """The settings of a model's reading that its family uses."""
    return {key: value for key, value in config.plain(model.reading).items() if key in model.settings}


def override(family: str, reading: Reading, changes: Mapping[str, Any]) -> Reading:
    """A reading with some settings changed. A setting that the family does not use is an error. A discount belongs to
    its clamp: with another clamp it is 0, unless it is given as well."""
    used = families.family(family).settings
    for key in changes:
        if key not in used:
            raise UnknownNameError(f"setting of {family}", key, used)
    if "clamp" in changes:
        changes = {"discount": 0.0, **changes}
    return config.build(Reading, config.plain(reading) | dict(changes), "reading")


def require_model_keys(family: str, values: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a reading setting among the values of a model's config."""
    found = families.family(family)
    for key, value in values.items():
        if key in found.settings and key not in config.keys(found.Config):
            raise ConfigError(
                f"model.{key}={config.shown(value)} does not exist: {key} is a reading setting of {family}; "
                f"use reading={{{key!r}: {value!r:.80}}}, or --set reading.{key}={config.shown(value)}"
            )


def _read_reading(described: Mapping[str, Any], path: Path) -> Reading:
    try:
        return override(described["family"], families.family(described["family"]).reading, described["reading"])
    except ConfigError as error:
        raise CheckpointError(f"{path / CONFIG} is not valid: {error}") from None


def _require_fit(
    stored: Any,
    reading: Reading,
    described: Mapping[str, Any],
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    path: Path,
) -> None:
    """The config matches the reading, the tokenizer, and the names, shapes and dtype of the weights."""
    # A model with a byte tokenizer may have more or fewer than 256 tokens; any other tokenizer must have the same size.
    fits = tokenizer.size == stored.vocabulary or tokenizer.kind == "bytes"
    if tokenizer.kind != described["tokenizer"] or not fits:
        found = f"{tokenizer.kind!r} with {tokenizer.size} tokens"
        wanted = f"{described['tokenizer']!r:.40} with {stored.vocabulary}"
        raise CheckpointError(f"{path} has the tokenizer {found}, but its config says {wanted}; {MISMATCH}")
    if getattr(stored, "layers", 0) > len(tensors):
        raise CheckpointError(
            f"{path} has {counted(len(tensors), 'tensor')} for {counted(stored.layers, 'layer')}; it is damaged"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype != DTYPES[described["dtype"]]:
            wanted = described["dtype"]
            raise CheckpointError(f"{path / WEIGHTS} has {name!r:.80} as {tensor.dtype}, but its config says {wanted}")
    expected = meta_weights(lambda: families.create(described["family"], stored, reading))
    require_match(expected, tensors, str(path / WEIGHTS))


def _read_config(content: bytes, path: Path) -> dict[str, Any]:
    """config.json, upgraded to format 2. `format` stays that of the file, and `identity` is the part that the model's
    hash covers, as the file has it: a state saved by longspan 0.1 still fits its model."""
    values = read_json(content, str(path / CONFIG))
    found = values.get("format")
    if found not in (1, FORMAT) or isinstance(found, bool):
        raise CheckpointError(f"{path} has format {found!r:.40}; this version of longspan reads formats 1 and {FORMAT}")
    kinds = {"family": str, "dtype": str, "tokens" if found == 1 else "tokenizer": str, "model": dict}
    kinds |= {} if found == 1 else {"reading": dict}
    if set(values) != {"format", *kinds} or not all(isinstance(values[key], kind) for key, kind in kinds.items()):
        raise CheckpointError(
            f"{path / CONFIG} must contain format, {', '.join(kinds)} and nothing else; it is damaged"
        )
    if values["dtype"] not in (*DTYPES, DTYPE):
        raise CheckpointError(
            f"{path} has weights of dtype {values['dtype']!r:.40}; longspan reads {', '.join((*DTYPES, DTYPE))}"
        )
    values["identity"] = {key: values[key] for key in ("family", "model")}
    if found == 1:
        values["tokenizer"] = values.pop("tokens")
        values["family"], values["model"], values["reading"] = upgrade_config(values["family"], values["model"])
    return values


def _dtype_name(model: LanguageModel) -> str:
    dtypes = {tensor.dtype for tensor in weights_of(model).values() if tensor.is_floating_point()}
    names = {name for name, dtype in DTYPES.items() if dtype in dtypes}
    if len(dtypes) != 1 or not names:
        kinds = ", ".join(sorted(map(str, dtypes)))
        raise CheckpointError(f"this model has weights in {kinds}; convert it to one of {', '.join(DTYPES)}")
    return names.pop()


def _hash(identity: Mapping[str, Any], tokenizer: Tokenizer, files: Mapping[str, Entry]) -> str:
    """Identifies a model: SHA-256 over family, config, tokenizer and weights. The reading is not part of it."""
    weights = (
        files[WEIGHTS].sha256 if WEIGHTS in files else [files[n].sha256 for n in sorted(files) if SHARD.fullmatch(n)]
    )
    parts = {**identity, "tokens": tokenizer.fingerprint, "weights": weights}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def notes_of(card: str) -> list[str]:
    """The notes in a card that say where its model comes from."""
    section = card.partition(f"{_ORIGIN}\n")[2].partition("\n## ")[0]
    return [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]


def _commands(model: LanguageModel, family: str) -> list[str]:
    """What the model can be used for."""
    if family == "task":
        return ["predict MODEL --data FILE", "embed MODEL --data FILE --out features.npy"]
    if not model.predicts_next:
        return ["finetune MODEL --task FOLDER --out RUN", "embed MODEL --data FILE --out features.npy"]
    return ["eval MODEL --data FILE", 'generate MODEL -p "Once" -n 200']


def _card(
    model: LanguageModel, described: Mapping[str, Any], tokenizer: Tokenizer, notes: Iterable[str], opening: str
) -> str:
    title = [] if opening.startswith("# ") else [f"# A {described['family']} model", ""]
    lines = [
        *title,
        *([opening.strip(), "", "## What it is", ""] if opening.strip() else []),
        f"- family: {described['family']}",
        f"- parameters: {model.parameter_count:,} ({described['dtype']})",
        f"- tokenizer: {tokenizer.kind}, {tokenizer.size:,} tokens",
        *(f"- {key}: {config.show(value)}" for key, value in described["model"].items()),
        f"- read with: {', '.join(f'{key} {config.show(value)}' for key, value in described['reading'].items())}",
        *(["", _ORIGIN, "", *(f"- {note}" for note in notes)] if (notes := list(notes)) else []),
        "",
        "## How to use it",
        "",
        "    longspan info MODEL",
        *(f"    longspan {words}" for words in _commands(model, described["family"])),
        "",
        "MODEL is this folder. On every load, all files except this one are checked against the SHA-256 in",
        "manifest.json. You can edit this file.",
        "",
    ]
    return "\n".join(lines)
