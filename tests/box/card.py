"""What cards say, read back."""

import re
from dataclasses import dataclass

# Of a card of benchmarks/make_card.py: text, memory, clamp, score and command.
SCORE = r"(\d+\.\d{4})(?: \(static [\d.]+\))?"
FIGURE = re.compile(rf"^\| ([^|]+) \| (\d+) \| (\d+) \| {SCORE} \| `longspan eval MODEL ([^`]+)` \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    text: str
    memory: int
    clamp: int
    bits: float
    command: str


def rows(card: str) -> list[Row]:
    """Its figures, in order."""
    found = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d\.\d{4}) \| `([^`]+)` \|$", card, re.MULTILINE)
    return [Row(text, int(memory), int(clamp), float(bits), command) for text, memory, clamp, bits, command in found]


def of(card: str, text: str, clamp: int) -> dict[int, float]:
    """Bits by memory of one text, with that clamp where it was tried: it makes no difference to shorter memories."""
    found = [row for row in rows(card) if row.text == text]
    return {row.memory: row.bits for row in sorted(found, key=lambda row: (row.memory, row.clamp == clamp))}


def value(card: str, pattern: str) -> str:
    """The one thing in it that a pattern's group matches."""
    (found,) = re.findall(pattern, card)
    return str(found)
