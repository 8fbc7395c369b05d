"""Parsers for the cards."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE_ROW = re.compile(
    r"^\| ([^|]+) \| (\d+) \| (\d+) \| (?:([\d.]+) \| )??(not measured|\d+\.\d{4}) \| (-|\d+\.\d{4}) \| ([^|]+) \| "
    r"`longspan eval MODEL ([^`]+)` \|$",
    re.MULTILINE,
)
BUNDLED_ROW = re.compile(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d\.\d{4}) \| `([^`]+)` \|$", re.MULTILINE)


@dataclass(frozen=True)
class RecipeRow:
    """A row of a card made by benchmarks/make_card.py. The command starts after `longspan eval MODEL`."""

    text: str
    memory: int
    clamp: int
    discount: float
    comparable: float | None
    best: float | None
    uses: str
    command: str

    @property
    def score(self) -> float:
        """What the command prints: the best result, or the comparable one in a row of its own."""
        score = self.comparable if self.best is None else self.best
        assert score is not None
        return score

    @property
    def split(self) -> str:
        return self.text.partition("--split ")[2]

    @property
    def is_dynamic(self) -> bool:
        return "--dynamic" in self.command

    @property
    def has_pointer(self) -> bool:
        return "--pointer 0" not in self.command and "pointer" in self.uses

    def flag(self, name: str, default: str = "") -> str:
        found = re.search(rf"--{name} (\S+)", self.command)
        return found[1] if found else default

    @property
    def is_comparable(self) -> bool:
        return not self.is_dynamic and not self.has_pointer and float(self.flag("temp", "1")) == 1

    @property
    def is_baseline(self) -> bool:
        """Scored without the help that the best result uses. Its temperature need not be the chosen one."""
        return self.is_comparable or self.flag("pointer") == "0"

    @property
    def temperature(self) -> float:
        return float(self.flag("temp", "1"))

    @property
    def context(self) -> tuple[int, int, float]:
        return self.memory, self.clamp, self.discount

    @property
    def settings(self) -> tuple[object, ...]:
        """What is chosen on the validation split."""
        return *self.context, self.flag("pointer"), self.temperature, self.flag("dynamic-rate")


def recipe_rows(card: str) -> list[RecipeRow]:
    def number(word: str) -> float | None:
        return None if word in ("-", "not measured") else float(word)

    return [
        RecipeRow(text, int(memory), int(clamp), float(discount or 0), number(comparable), number(best), uses, command)
        for text, memory, clamp, discount, comparable, best, uses, command in RECIPE_ROW.findall(card)
    ]


@dataclass(frozen=True)
class BundledRow:
    """A row of the bundled model's card."""

    text: str
    memory: int
    clamp: int
    bits: float
    command: str


def bundled_rows(card: str) -> list[BundledRow]:
    found = BUNDLED_ROW.findall(card)
    return [
        BundledRow(text, int(memory), int(clamp), float(bits), command) for text, memory, clamp, bits, command in found
    ]


def bits_by_memory(card: str, text: str, clamp: int) -> dict[int, float]:
    """The bits of one text by memory, with that clamp where it was tried. It does not affect shorter memories."""
    found = [row for row in bundled_rows(card) if row.text == text]
    return {row.memory: row.bits for row in sorted(found, key=lambda row: (row.memory, row.clamp == clamp))}


def value(card: str, pattern: str) -> str:
    """The group of a pattern that matches exactly once."""
    (found,) = re.findall(pattern, card)
    return str(found)


def number(card: str, pattern: str) -> int:
    """The same for an integer with thousands separators."""
    return int(value(card, pattern).replace(",", ""))


def steps_and_tokens(card: str) -> tuple[int, int]:
    return number(card, r", ([\d,]+) steps, [\d,]+ tokens of"), number(card, r", [\d,]+ steps, ([\d,]+) tokens of")


def is_known(commit: str) -> bool:
    """Whether the history contains the commit; true where there is no complete history to check."""
    history = subprocess.run(["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=False)
    complete = history.returncode == 0 and not (ROOT / ".git" / "shallow").exists()
    return not complete or commit in history.stdout.split()


def tokens_read(steps: int, text: int, batch: int, segment: int) -> int:
    """Tokens of that many steps over a text of that many tokens. The last segment of a pass is shorter."""
    row = (text - 1) // batch
    passes, more = divmod(steps, -(-row // segment))
    return batch * (passes * row + more * segment)
