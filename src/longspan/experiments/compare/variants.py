"""The members of a comparison: every recipe, with every point of a grid, with every seed."""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError

MOST = 1000
"""Members of one comparison."""


@dataclass(frozen=True)
class Variant:
    """A recipe, called `base`, with some keys changed. Variants of one `group` differ in their seed only."""

    file: Path
    base: str
    group: str
    overrides: tuple[str, ...] = ()
    seed: int | None = None


def parse_grid(pairs: Sequence[str]) -> dict[str, list[str]]:
    """`["training.lr=0.003,0.006", ...]` as values by key. Commas inside brackets do not separate."""
    grid: dict[str, list[str]] = {}
    for pair in pairs:
        key, sign, text = (part.strip() for part in pair.partition("="))
        values = _split(text)
        if not sign or not key or not values or not all(values):
            raise ConfigError(f"grid {pair!r} is not KEY=VALUE,VALUE; write for example training.lr=0.003,0.006")
        if key in grid:
            raise ConfigError(f"grid {pair!r} repeats the key {key}; list all its values in one grid")
        if len(set(values)) < len(values):
            raise ConfigError(f"grid {pair!r} repeats a value; list each value only once")
        grid[key] = values
    return grid


def _split(text: str) -> list[str]:
    """Parts between commas that are outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def parse_each(changes: Sequence[str]) -> list[list[str]]:
    """`["model.qk_norm=false", "model.norm=post,model.final_norm=false"]`: the keys that each variant changes."""
    found = [_split(change) for change in changes]
    for change, pairs in zip(changes, found, strict=True):
        if not all(re.fullmatch(r"[a-z_]+\.[a-z_]+=.+", pair) for pair in pairs):
            raise ConfigError(f"change {change!r} is not KEY=VALUE,...; write for example model.qk_norm=false")
        if found.count(pairs) > 1:
            raise ConfigError(f"change {change!r} is given twice; use it only once")
    return found


def variants(
    members: Mapping[str, Path],
    grid: Mapping[str, Sequence[str]],
    seeds: Sequence[int | None],
    each: Sequence[list[str]] = (),
) -> dict[str, Variant]:
    """The variants of named recipes by name, which is also the name of the run's folder: the product of the grid, or
    each recipe as it is and with every one of the changes `each` alone."""
    found: dict[str, Variant] = {}
    if grid and each:
        raise ConfigError("a grid (--grid) and single changes (--each) cannot be combined; use only one of them")
    points = [
        [f"{key}={value}" for key, value in zip(grid, point, strict=True)]
        for point in itertools.product(*grid.values())
    ] + list(each)
    if len(members) * len(points) * len(seeds) > MOST:
        count = len(members) * len(points) * len(seeds)
        raise ConfigError(
            f"the recipes, changes and seeds make {count:,} runs, but at most {MOST:,} are allowed; use fewer "
            "values or seeds"
        )
    for name, file in members.items():
        for point in points:
            group = " ".join([name, *point])
            for seed in seeds:
                parts = [name, *point, *([f"seed-{seed}"] if len(seeds) > 1 else [])]
                folder = "--".join(re.sub(r"[^\w.=+-]", "_", part) for part in parts[1:])
                label = f"{name}--{folder}" if folder else name
                found[label] = Variant(file, name, group, tuple(point), seed)
    return found


@dataclass(frozen=True)
class Spread:
    """The bits of a group over its seeds: mean and sample standard deviation."""

    group: str
    seeds: int
    bits: float
    deviation: float
    unit: str

    @property
    def facts(self) -> dict[str, Any]:
        return {"group": self.group, "seeds": self.seeds, "bits": self.bits, "deviation": self.deviation}


def spreads(groups: Mapping[str, str], scores: Mapping[str, Mapping[str, Any]]) -> list[Spread]:
    """The spread of every group with at least two scores. `groups` and `scores` are by the name of the member."""
    members: dict[str, list[Mapping[str, Any]]] = {}
    for name, score in scores.items():
        members.setdefault(groups[name], []).append(score)
    found = []
    for group, each in members.items():
        bits = [float(score["bits"]) for score in each]
        if len(bits) > 1:
            spread = statistics.stdev(bits)
            found.append(Spread(group, len(bits), statistics.fmean(bits), spread, str(each[0]["unit"])))
    return found
