"""The line of a recipe's file that an error is about."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def line_of(message: str, path: Path, over: Mapping[str, Any]) -> int | None:
    """The line of the key that an error message names; None if an override set it, or if it names none."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    keys = re.findall(r"\b([a-z]\w*)\.([a-z]\w*)", message)
    if message.startswith("no family called"):
        keys = [("model", "family")]
    for table, key in keys:
        if key in over.get(table, {}):
            return None
        if number := _line_of_key(lines, table, key):
            return number
    for found in re.finditer(r"no table called '([^']+)'|^(\w+)=.* must be a table", message):
        table = found[1] or found[2]
        if table in over:
            return None
        name = re.escape(table)
        for number, line in enumerate(lines, start=1):
            if re.match(rf"\s*(\[+\s*{name}\s*[\].]|{name}\s*[.=])", line):
                return number
    return None


def _line_of_key(lines: Sequence[str], table: str, key: str) -> int | None:
    """The line of a key: under the header of its table, dotted, in an inline table, or as a header of its own."""
    name = rf"[\"']?{re.escape(key)}[\"']?"
    outside = rf"\s*{table}\s*(\.\s*{name}\s*=|=\s*\{{.*\b{name}\s*=)"
    inside = ""
    for number, line in enumerate(lines, start=1):
        if header := re.match(r"\s*\[+([^\]]+)\]", line):
            inside = header[1].strip()
            if re.fullmatch(rf"{table}\s*\.\s*{name}", inside):
                return number
        elif inside in ("", table) and re.match(rf"\s*{name}\s*=" if inside else outside, line):
            return number
    return None
