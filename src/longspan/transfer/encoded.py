"""The tokens of many texts, kept in the cache. Encoding IMDB takes 50 s of a core, and every run on it needs them."""

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longspan.data.cache import cache_folder, write_atomic
from longspan.tokenizers import Tokenizer

Ids = NDArray[np.integer]
KEPT = 1 << 20
"""Bytes of text from which on tokens are kept."""


def encode_texts(tokenizer: Tokenizer, texts: Sequence[bytes]) -> list[Ids]:
    """The tokens of every text: those of the cache if the same texts were encoded before, with the same tokenizer."""
    if sum(map(len, texts)) < KEPT:
        return tokenizer.encode_many(texts, "the task", partial=True)
    path = cache_folder() / "encoded-tasks" / f"{digest(tokenizer, texts)}.npz"
    if (found := _read(path, len(texts))) is None:
        found = tokenizer.encode_many(texts, "the task", partial=True)
        ends = np.cumsum([len(ids) for ids in found])
        write_atomic(path, lambda file: np.savez(file, tokens=np.concatenate(found), ends=ends))
    return found


def digest(tokenizer: Tokenizer, texts: Sequence[bytes]) -> str:
    """SHA-256 of the tokenizer and of the texts with their sizes."""
    found = hashlib.sha256(tokenizer.fingerprint.encode())
    found.update(np.array([len(text) for text in texts], np.int64).tobytes())
    for text in texts:
        found.update(text)
    return found.hexdigest()


def _read(path: Path, count: int) -> list[Ids] | None:
    """The tokens in a file of the cache; None if it is missing or damaged."""
    try:
        with np.load(path) as file:
            tokens, ends = file["tokens"], file["ends"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return np.split(tokens, ends[:-1]) if len(ends) == count and ends[-1] == len(tokens) else None
