"""Tokenizers: bytes, characters, words and subwords."""

import builtins
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.errors import CheckpointError, DataError
from longspan.tokenizers.bytes import ByteTokenizer
from longspan.tokenizers.characters import CharacterTokenizer
from longspan.tokenizers.subwords import SubwordTokenizer
from longspan.tokenizers.tokenizer import FORMAT, Ids, Tokenizer, Unit
from longspan.tokenizers.words import WordTokenizer

__all__ = [
    "KINDS",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Ids",
    "SubwordTokenizer",
    "Tokenizer",
    "Unit",
    "WordTokenizer",
    "read_tokenizer",
    "tokenizer_from_dict",
    "tokenizer_from_json",
]

KINDS: dict[str, type[Tokenizer]] = {
    "bytes": ByteTokenizer,
    "characters": CharacterTokenizer,
    "words": WordTokenizer,
    "subwords": SubwordTokenizer,
}


def tokenizer_from_dict(values: Any) -> Tokenizer:
    """The tokenizer of a `to_dict`. Anything wrong with the values is a CheckpointError."""
    if not isinstance(values, Mapping):
        raise CheckpointError("the stored tokenizer is not a JSON object; it is damaged or from another program")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise CheckpointError(
            f"the stored tokenizer has kind {str(kind)[:40]!r}; this version of longspan reads {known}"
        )
    if values.get("format") != FORMAT or isinstance(values.get("format"), bool):
        found = str(values.get("format"))[:40]
        raise CheckpointError(
            f"the stored tokenizer has format {found}; this version of longspan reads format {FORMAT}"
        )
    return KINDS[kind].from_dict(values)


def tokenizer_from_json(text: str | builtins.bytes) -> Tokenizer:  # here `bytes` is the submodule
    """The tokenizer of a tokenizer.json."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError("the stored tokenizer is not JSON; it is damaged or from another program") from None
    return tokenizer_from_dict(values)


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file or folder: a tokenizer.json of the `tokenizers` library or of a longspan model, or a file
    with one word per line."""
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix != ".json":
        return WordTokenizer.from_vocabulary(path)
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; use a tokenizer.json or its folder") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not JSON; it is damaged or not a tokenizer") from None
    if not isinstance(values, dict) or "kind" not in values:
        return SubwordTokenizer.from_file(path)
    try:
        return tokenizer_from_dict(values)
    except CheckpointError as error:
        raise DataError(f"{path} cannot be used: {error}") from None
