"""Tokenizers: bytes, characters and words."""

import builtins
import json
from collections.abc import Mapping
from typing import Any

from longspan.errors import CheckpointError
from longspan.tokenizers.bytes import ByteTokenizer
from longspan.tokenizers.characters import CharacterTokenizer
from longspan.tokenizers.tokenizer import FORMAT, Ids, Tokenizer, Unit
from longspan.tokenizers.words import WordTokenizer

__all__ = [
    "KINDS",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Ids",
    "Tokenizer",
    "Unit",
    "WordTokenizer",
    "tokenizer_from_dict",
    "tokenizer_from_json",
]

KINDS: dict[str, type[Tokenizer]] = {
    "bytes": ByteTokenizer,
    "characters": CharacterTokenizer,
    "words": WordTokenizer,
}


def tokenizer_from_dict(values: Any) -> Tokenizer:
    """The tokenizer of a `to_dict`. Anything wrong with the values is a CheckpointError."""
    if not isinstance(values, Mapping):
        raise CheckpointError("the stored tokenizer is not a JSON object; it is damaged or from another program")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise CheckpointError(f"the stored tokenizer has kind {str(kind)[:40]!r}; this longspan reads {known}")
    if values.get("format") != FORMAT or isinstance(values.get("format"), bool):
        found = str(values.get("format"))[:40]
        raise CheckpointError(f"the stored tokenizer has format {found}; this longspan reads format {FORMAT}")
    return KINDS[kind].from_dict(values)


def tokenizer_from_json(text: str | builtins.bytes) -> Tokenizer:  # here `bytes` is the submodule
    """The tokenizer of a tokenizer.json."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError("the stored tokenizer is not JSON; it is damaged or from another program") from None
    return tokenizer_from_dict(values)
