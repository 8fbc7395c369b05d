"""Convert tables to JSON lines: Parquet, and Arrow files as in saved data sets."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.tokenizers.text import encoding_hint

TABLES = (".parquet", ".arrow")
FIELD = "text"
_ROWS = 1024
_STRINGS = ("string", "large_string", "string_view")
_BINARY = ("binary", "large_binary", "binary_view")
_ARROW_FILE = b"ARROW1"  # how an Arrow file with random access begins; `datasets` writes streams


def write_table(path: Path, column: str, encoding: str | None, shown: str, target: Path) -> None:
    """Write a column of a Parquet or Arrow file as JSON lines.

    The column is a string, or binary text in an `encoding` (default: UTF-8). `a.b` is the field b of the struct a.
    Errors call the file `shown`.
    """
    with target.open("wb") as out:
        for text in _column(path, column, encoding, shown):
            if text is not None:
                out.write(json.dumps({FIELD: text}, ensure_ascii=False).encode() + b"\n")


def _column(path: Path, column: str, encoding: str | None, shown: str) -> Iterator[str | None]:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{shown} needs pyarrow; install it with: pip install 'longspan[arrow]'") from None
    row, binary = 0, False
    try:
        schema, batches = _open_table(path, column)
        keys, kind = _find_column(schema, column, shown)
        binary = kind in _BINARY
        for batch in batches:
            values = batch.column(keys[0])
            values = pyarrow.compute.struct_field(values, keys[1:]) if keys[1:] else values
            for text in _texts(values, encoding):
                row += 1
                yield text
    except UnicodeError as error:
        where = f"row {row + 1} of the column {column!r} of {shown}"
        raise DataError(f"{where} {_problem(error, encoding if binary else None, binary)}") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{shown} cannot be read: {str(error)[:120]}; it is damaged or not a table") from None


def _open_table(path: Path, column: str) -> tuple[Any, Iterable[Any]]:
    """The schema of a table and its rows in batches."""
    import pyarrow

    if path.suffix.lower() == ".parquet":
        table = pyarrow.parquet.ParquetFile(path)
        return table.schema_arrow, table.iter_batches(_ROWS, columns=[column])
    source = pyarrow.memory_map(str(path))
    if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
        file = pyarrow.ipc.open_file(source)
        return file.schema, (file.get_batch(k) for k in range(file.num_record_batches))
    source.seek(0)
    stream = pyarrow.ipc.open_stream(source)
    return stream.schema, stream


def _find_column(schema: Any, column: str, shown: str) -> tuple[list[str], str]:
    """The keys that lead to a column of texts, and its type."""
    keys = [column] if column in schema.names else column.split(".")
    fields, kind = {field.name: field.type for field in schema}, None
    for place, key in enumerate(keys):
        if key not in fields:
            above = "".join(f"{one}." for one in keys[:place])
            known = ", ".join(above + name for name in list(fields)[:8])
            raise DataError(
                f"{shown} has no column {column!r}; its columns are {known or 'none'}; select the one with the "
                "text with --field"
            )
        kind = fields[key]
        fields = {kind.field(k).name: kind.field(k).type for k in range(kind.num_fields)} if _is_struct(kind) else {}
    if fields:
        known = ", ".join(f"{column}.{name}" for name in list(fields)[:8])
        raise DataError(
            f"the column {column!r} of {shown} is a struct; select the field with the text with --field: {known}"
        )
    stored = str(getattr(kind, "value_type", kind)) if str(kind).startswith("dictionary<") else str(kind)
    if stored not in (*_STRINGS, *_BINARY):
        raise DataError(
            f"the column {column!r} of {shown} has the type {str(kind)[:80]} instead of string; use another --field"
        )
    return keys, stored


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<")


def _texts(values: Any, encoding: str | None) -> Iterator[str | None]:
    """Values of a column as strings. An error is raised at the row that it is in."""
    try:
        found: Iterable[Any] = values.to_pylist()
    except UnicodeDecodeError:
        found = (value.as_py() for value in values)
    for value in found:
        yield value.decode(encoding or "utf-8") if isinstance(value, bytes) else value


def _problem(error: UnicodeError, encoding: str | None, binary: bool) -> str:
    if encoding is not None:
        return f"is not {encoding}; use another --encoding"
    if binary and isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8; {encoding_hint(error.object, error.start)}"
    return "is not UTF-8, as a string must be; write the table again with this column as UTF-8, or as binary"
