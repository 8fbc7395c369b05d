"""What cards say, read back."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

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


def number(card: str, pattern: str) -> int:
    """The same where it is a whole number, written with commas."""
    return int(value(card, pattern).replace(",", ""))


def steps_and_tokens(card: str) -> tuple[int, int]:
    return number(card, r", ([\d,]+) steps, [\d,]+ tokens of"), number(card, r", [\d,]+ steps, ([\d,]+) tokens of")


def is_known(commit: str) -> bool:
    """Whether the history has it, where there is a whole one."""
    history = subprocess.run(["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=False)
    told = history.returncode == 0 and not (ROOT / ".git" / "shallow").exists()
    return not told or commit in history.stdout.split()


def tokens_read(steps: int, text: int, batch: int, segment: int) -> int:
    """By so many steps over a text of so many tokens: the segment that ends a pass is a shorter one."""
    row = (text - 1) // batch
    passes, more = divmod(steps, -(-row // segment))
    return batch * (passes * row + more * segment)
