"""Prompts from a file: one per line, or JSON lines."""

import json
from pathlib import Path

from longspan.errors import DataError, not_read

LARGEST = 64 << 20


def read_prompts(path: Path, field: str = "prompt") -> list[str]:
    """The prompts of a file. A line of a .jsonl file is a string or an object with the key `field`; a line of any other
    file is a prompt as it stands. Empty lines are skipped."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise not_read(f"the prompts in {path}", error) from None
    if len(data) > LARGEST:
        raise DataError(f"the prompts in {path} have more than {LARGEST:,} bytes; use a smaller file")
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the prompts in {path} are not UTF-8 at byte {error.start}; convert the file to UTF-8"
        ) from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            json_line = path.suffix.lower() in (".jsonl", ".ndjson")
            prompts.append(_from_json(line, field, f"line {number} of {path}") if json_line else line.rstrip("\r"))
    if not prompts:
        raise DataError(f"{path} has no prompts; write one per line")
    return prompts


def _from_json(line: str, field: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; write one JSON value per line") from None
    found = value.get(field) if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise DataError(f"{where} has no text under {field!r}; write a string or an object with that key")
    return found
