"""Convert text in other encodings to UTF-8."""

import codecs
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.tokenizers.text import read_blocks, to_bytes


def transcode(path: Path, encoding: str, shown: str, target: Path) -> None:
    """Write the text of a file as UTF-8, without a byte order mark. Errors call the file `shown`."""
    decoder = find_encoding(encoding).incrementaldecoder()
    seen = 0
    with target.open("wb") as out:
        for block in read_blocks(path):
            out.write(_decode(decoder, block, shown, encoding, seen))
            seen += len(block)
        out.write(_decode(decoder, b"", shown, encoding, seen, final=True))


def find_encoding(name: str) -> codecs.CodecInfo:
    try:
        found = codecs.lookup(name)
        if not found._is_text_encoding:  # type: ignore[attr-defined]  # base64 and the like
            raise LookupError
        return found
    except (LookupError, ValueError):
        raise DataError(f"no encoding called {name[:40]!r}; use a name such as cp1252, shift-jis or utf-16") from None


def _decode(decoder: Any, block: bytes, shown: str, encoding: str, seen: int, final: bool = False) -> bytes:
    try:
        return to_bytes(decoder.decode(block, final).removeprefix("\ufeff" if not seen else ""))
    except UnicodeError as error:
        at = seen + getattr(error, "start", 0)
        raise DataError(f"{shown} is not {encoding} near byte {at}; use another --encoding") from None
