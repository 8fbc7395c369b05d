"""Detection of JSON lines: files with one JSON object per line."""

import codecs
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from longspan.data.splits import Document
from longspan.data.tables import FIELD
from longspan.errors import DataWarning

_SUFFIXES = (".jsonl", ".ndjson")
_MAX_DOCUMENTS = 32  # opening each of a hundred thousand would take seconds
_HEAD_BYTES, _MAX_LINE_BYTES, _LINES = 64, 1 << 20, 3


def warn_about_json_lines(documents: Sequence[Document]) -> None:
    """Warn about the first document that looks like JSON lines and is read as plain text.

    The sentence is the same for every split, so Python shows it once.
    """
    plain = [document for document in documents if document.size and document.field is None]
    found = next((d for d in plain[:_MAX_DOCUMENTS] if has_json_lines(d.path)), None)
    if found is not None:
        warnings.warn(
            f"{found.name!r} looks like JSON lines and is read as plain text, keys and quotes included; "
            "to read the text in its rows, add --field text, or name the file .jsonl",
            DataWarning,
            stacklevel=1,
        )


def json_lines_field(path: Path, field: str | None) -> str | None:
    """The field of the text if a file is read as JSON lines: by its name or, if a `field` is given, by its content."""
    if path.name.lower().endswith(_SUFFIXES):
        return field or FIELD
    return field if field is not None and has_json_lines(path) else None


def has_json_lines(path: Path) -> bool:
    """Whether the first lines of a file are JSON objects."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
            if not head.startswith(b"{"):
                return False
            *lines, last = (head + file.read(_MAX_LINE_BYTES)).split(b"\n")
            if not file.read(1):
                lines.append(last)  # the file ends here, so this line is complete
        if not lines:  # the first line is longer than what was read; no other format has such lines
            return head.startswith(b'{"')
        first = [line for line in lines if line.strip()][:_LINES]
        return all(isinstance(json.loads(line), dict) for line in first)
    except (OSError, ValueError, RecursionError):
        return False
