"""JSON lines: a file of one JSON object per line, whose text must be extracted before it is read."""

import codecs
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from longspan.data.splits import Document

_SUFFIXES = (".jsonl", ".ndjson")
_LOOKED_AT = 32  # documents; opening each of a hundred thousand would take seconds
_BEGINNING, _LONGEST, _LINES = 64, 1 << 20, 3


class DataWarning(UserWarning):
    """A text that can be read, but probably not as it was meant."""


def warn_of_json_lines(documents: Sequence[Document]) -> None:
    """Names the first document that looks like JSON lines. The same sentence whatever is read, so it is told once."""
    full = [document for document in documents if document.size]
    named = [document for document in full if document.name.lower().endswith(_SUFFIXES)]
    found = next(iter(named), None) or next((d for d in full[:_LOOKED_AT] if _holds_objects(d.path)), None)
    if found is not None:
        warnings.warn(
            f"{found.name!r} looks like JSON lines and is read as raw text, keys and quotes included; extract the text "
            "first, for example with: jq -r .text FILE > text.txt",
            DataWarning,
            stacklevel=1,
        )


def _holds_objects(path: Path) -> bool:
    """Whether the first lines of a file are JSON objects."""
    try:
        with path.open("rb") as file:
            head = file.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip()
            if not head.startswith(b"{"):
                return False
            *lines, last = (head + file.read(_LONGEST)).split(b"\n")
            if not file.read(1):
                lines.append(last)  # it is whole
        if not lines:  # the first line is longer than what was read, as that of no other format is
            return head.startswith(b'{"')
        first = [line for line in lines if line.strip()][:_LINES]
        return all(isinstance(json.loads(line), dict) for line in first)
    except (OSError, ValueError, RecursionError):
        return False
