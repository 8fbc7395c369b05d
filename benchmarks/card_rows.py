"""The rows of a card: what is scored, and in which order settings are chosen."""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cards import Scores, is_beyond, memories_and_clamps, reading_flags

from longspan.models.families import family
from longspan.training.recipe import Recipe


@dataclass(frozen=True)
class Row:
    """One way to score a text, and its score."""

    text: str
    memory: int
    clamp: int
    discount: float
    flags: str
    pointer: int | None
    """Positions the pointer may copy from; None for a model without a pointer."""
    temperature: float = 1.0
    rate: float | None = None
    """Learning rate of dynamic evaluation; None is static."""
    score: float = 0.0
    static: float | None = None
    """With a rate, the score without learning."""
    comparable: float | None = None
    """The comparable score of the same text, memory and clamp, where it was measured."""

    @property
    def is_comparable(self) -> bool:
        return not self.pointer and self.temperature == 1 and self.rate is None

    @property
    def command(self) -> str:
        pointer = "" if self.pointer is None else f" --pointer {self.pointer}"
        learning = "" if self.rate is None else f" --dynamic --dynamic-rate {self.rate:g}"
        return f"longspan eval MODEL {self.text} {self.flags}{pointer} --temp {self.temperature:g}{learning}"

    @property
    def uses(self) -> str:
        parts = [f"pointer {self.pointer}"] * bool(self.pointer)
        parts += [f"temperature {self.temperature:g}"] * (self.temperature != 1)
        if self.rate is not None:
            parts.append(f"dynamic {self.rate:g} (static {self.static:.4f})")
        return ", ".join(parts)

    @property
    def words(self) -> str:
        """What the row uses, for a sentence."""
        parts = [f"a pointer to {self.pointer} tokens"] * bool(self.pointer)
        parts += [f"temperature {self.temperature:g}"] * (self.temperature != 1)
        if self.rate is not None:
            parts.append(f"dynamic evaluation at rate {self.rate:g}")
        return " and ".join(parts)

    @property
    def key(self) -> tuple[Any, ...]:
        """Rows with the same key differ in what makes a result comparable, and in segments."""
        return self.text, self.memory, self.clamp, self.discount

    def __str__(self) -> str:
        name, best = self.text.removeprefix("--data "), f"{self.score:.4f}"
        known = "not measured" if self.comparable is None else f"{self.comparable:.4f}"
        scores = f"{best} | - | -" if self.is_comparable else f"{known} | {best} | {self.uses}"
        return f"| {name} | {self.memory} | {self.clamp} | {self.discount:g} | {scores} | `{self.command}` |"


class Search:
    """Chooses settings on the validation split and scores the other texts with them."""

    def __init__(self, asked: argparse.Namespace, recipe: Recipe, data: str, scores: Scores) -> None:
        self.asked, self.recipe, self.data, self.scores = asked, recipe, shlex.quote(data), scores
        self.usual, self.settings = recipe.evaluation_reading(), family(recipe.family).settings
        self.pointer = self.usual.pointer if has_pointer(recipe) else None

    def __iter__(self) -> Iterator[Row]:
        """All rows: the validation split with every candidate, then the other texts with the best."""
        static: list[Row] = []
        for rows in (self.readings, self.pointers, self.temperatures):
            found = self.scored(rows(static))
            yield from found
            static += found
        chosen = [best(static)]
        plain = replace(chosen[0], pointer=None if self.pointer is None else 0, temperature=1.0)
        if plain.key not in {row.key for row in static if row.is_comparable}:
            yield from self.scored([plain])
        if self.asked.dynamic:
            dynamic = self.rates(chosen[0])
            if len(dynamic) > 1:
                dynamic = self.scored(dynamic)
                yield from dynamic
            chosen.append(best(dynamic))
        if not chosen[0].is_comparable:
            chosen.insert(0, plain)
        for text in (f"{self.data} --split test", *map(shlex.quote, self.asked.also)):
            yield from self.scored([replace(row, text=f"--data {text}") for row in chosen])

    def scored(self, rows: list[Row]) -> list[Row]:
        unit, found = self.scores.found["unit"], [self.scores(row.command) for row in rows]
        return [
            replace(row, score=facts[unit], static=facts.get(f"static_{unit}"))
            for row, facts in zip(rows, found, strict=True)
        ]

    def readings(self, _: list[Row]) -> list[Row]:
        """The validation split with every memory, clamp and discount to choose from."""
        text, rows = f"--data {self.data} --split valid", []
        rest = f"--segment {self.usual.segment}" if self.asked.flags is None else self.asked.flags
        for way in candidates(self.asked, self.recipe):
            reach = self.pointer if way[0] or not self.pointer else 0  # without memory there is nothing to point to
            rows.append(Row(text, *way, self.flags(*way, rest), reach, self.usual.temperature))
        return rows

    def pointers(self, static: list[Row]) -> list[Row]:
        return [replace(best(static), pointer=reach) for reach in self.asked.pointers if reach != self.usual.pointer]

    def temperatures(self, static: list[Row]) -> list[Row]:
        others = [value for value in self.asked.temps if value != self.usual.temperature]
        return [replace(best(static), temperature=value) for value in others]

    def rates(self, static: Row) -> list[Row]:
        """Dynamic evaluation at every rate, with the settings of a static row or with a memory of its own."""
        way = (static.memory, static.clamp, static.discount)
        if self.asked.dynamic_memory is not None:
            memory, clamp = memories_and_clamps([self.asked.dynamic_memory], self.recipe.longest_distance)[-1]
            way = (memory, clamp, static.discount if clamp else 0.0)
        rest = self.asked.dynamic_flags
        rest = f"--segment {self.recipe.training_readings()[-1].segment}" if rest is None else rest
        learning = replace(static, memory=way[0], clamp=way[1], discount=way[2], flags=self.flags(*way, rest))
        return [replace(learning, rate=rate) for rate in self.asked.dynamic]

    def flags(self, memory: int, clamp: int, discount: float, rest: str) -> str:
        shown = discount if discount or self.usual.discount else None
        return f"{reading_flags(memory, clamp, self.settings, shown)} {rest}".lstrip()


def best(rows: list[Row]) -> Row:
    return min(rows, key=lambda row: row.score)


def candidates(asked: argparse.Namespace, recipe: Recipe) -> list[tuple[int, int, float]]:
    """Memories, clamps and discounts to choose from. A memory beyond the distances of training is tried without a clamp
    and with one or, where discounts are given, with a clamp and each of the discounts. The clamp of the recipe's
    evaluation is tried too."""
    usual, settings = recipe.evaluation_reading(), family(recipe.family).settings
    memories = asked.memories or [usual.memory if "memory" in settings else 0]
    longest = recipe.longest_distance if "clamp" in settings else None
    discounts = asked.discounts or [usual.discount] * bool(usual.discount)
    pairs = memories_and_clamps(memories, longest)
    if usual.clamp not in (0, longest):
        pairs += [(memory, usual.clamp) for memory in memories if is_beyond(memory, usual.clamp)]
    found = []
    for memory, clamp in pairs:
        if not discounts or longest is None or not is_beyond(memory, longest):
            found.append((memory, clamp, 0.0))
        elif clamp:
            found += [(memory, clamp, discount) for discount in discounts]
    return found


def has_pointer(recipe: Recipe) -> bool:
    return getattr(recipe.model, "pointer_width", 0) > 0


def with_comparable(rows: list[Row]) -> list[Row]:
    """Every row with the comparable score of its text, memory, clamp and discount, where that was measured."""
    known = {row.key: row.score for row in rows if row.is_comparable}
    return [replace(row, comparable=known.get(row.key)) for row in rows]
