"""Ways to read a text as tokens: bytes, characters, words."""

import builtins
import json
from collections.abc import Mapping
from typing import Any

from longspan.errors import CheckpointError
from longspan.tokens.bytes import ByteTokenizer
from longspan.tokens.characters import CharacterTokenizer
from longspan.tokens.tokenizer import FORMAT, Ids, Tokenizer, Unit
from longspan.tokens.words import WordTokenizer

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
    """The tokenizer that `to_dict` described; whatever is wrong with it is a CheckpointError."""
    if not isinstance(values, Mapping):
        raise CheckpointError("the stored tokenizer is not a table of values; it is damaged or foreign")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise CheckpointError(f"the stored tokenizer is of kind {str(kind)[:40]!r}; this longspan knows {known}")
    if values.get("format") != FORMAT or isinstance(values.get("format"), bool):
        found = str(values.get("format"))[:40]
        raise CheckpointError(f"the stored tokenizer has format {found}; this longspan reads format {FORMAT}")
    return KINDS[kind].from_dict(values)


def tokenizer_from_json(text: str | builtins.bytes) -> Tokenizer:  # `bytes` is the module of that name here
    """The tokenizer of a tokenizer.json."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError("the stored tokenizer is not JSON; it is damaged or foreign") from None
    return tokenizer_from_dict(values)
