"""Convert files that are not UTF-8 text or JSON lines: other encodings, Parquet, Arrow files of saved data sets."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.tokenizers.text import read_blocks, to_bytes

TABLES = (".parquet", ".arrow")
FIELD = "text"
_ROWS = 1024


def transcode(path: Path, encoding: str, target: Path) -> None:
    """Write the text of a file as UTF-8, without a byte order mark."""
    decoder = find_encoding(encoding).incrementaldecoder()
    seen = 0
    with target.open("wb") as out:
        for block in read_blocks(path):
            out.write(_decode(decoder, block, path, encoding, seen))
            seen += len(block)
        out.write(_decode(decoder, b"", path, encoding, seen, final=True))


def find_encoding(name: str) -> codecs.CodecInfo:
    try:
        found = codecs.lookup(name)
        if not found._is_text_encoding:  # type: ignore[attr-defined]  # base64 and the like
            raise LookupError
        return found
    except (LookupError, ValueError):
        raise DataError(f"no encoding called {name[:40]!r}; use a name such as cp1252, shift-jis or utf-16") from None


def write_table(path: Path, column: str, target: Path) -> None:
    """Write a column of a Parquet or Arrow file as JSON lines."""
    with target.open("wb") as out:
        for text in _column(path, column):
            if text is not None:
                out.write(json.dumps({FIELD: text}, ensure_ascii=False).encode() + b"\n")


def _decode(decoder: Any, block: bytes, path: Path, encoding: str, seen: int, final: bool = False) -> bytes:
    try:
        return to_bytes(decoder.decode(block, final).removeprefix("\ufeff" if not seen else ""))
    except UnicodeError as error:
        at = seen + getattr(error, "start", 0)
        raise DataError(f"{path} is not {encoding} near byte {at}; use another --encoding") from None


def _column(path: Path, column: str) -> Iterator[str | None]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow; install it with: pip install 'longspan[arrow]'") from None
    try:
        if path.suffix.lower() == ".parquet":
            source = pyarrow.parquet.ParquetFile(path)
            schema, batches = source.schema_arrow, source.iter_batches(_ROWS, columns=[column])
        else:
            source = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            schema, batches = source.schema, iter(source)
        if column not in schema.names:
            known = ", ".join(schema.names[:8])
            raise DataError(f"{path} has no column {column!r} but {known}; name the column of the text with --field")
        kind = stored = schema.field(column).type
        if pyarrow.types.is_dictionary(stored):  # the categories of pandas
            stored = stored.value_type
        if not (pyarrow.types.is_string(stored) or pyarrow.types.is_large_string(stored)):
            raise DataError(f"the column {column!r} of {path} has the type {kind}, not string; use another --field")
        for batch in batches:
            yield from batch.column(column).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {str(error)[:120]}; it is damaged or not a table") from None
