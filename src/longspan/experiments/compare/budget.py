"""The budget of every member of a comparison: params=41M,steps=N or params=41M,seconds=N."""

import re
from dataclasses import dataclass
from typing import Any

from longspan.errors import ConfigError

PERCENT = 2
FORMAT = "params=41M,steps=1000 or params=41M,seconds=600, or one part alone"
LARGEST = 10**15
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6}


@dataclass(frozen=True)
class Budget:
    """A part that is None is left to the recipe."""

    parameters: int | None = None
    steps: int | None = None
    seconds: int | None = None

    @property
    def limit(self) -> dict[str, int]:
        """The end of every run, as a key of a recipe's [training]."""
        given = {"steps": self.steps, "seconds": self.seconds}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def facts(self) -> dict[str, Any]:
        return {"params": self.parameters, "steps": self.steps, "seconds": self.seconds}

    def check_size(self, parameters: int) -> None:
        """Raise a ConfigError if a model is not of the budget's size. Models are never resized automatically."""
        if self.parameters is None or 100 * abs(parameters - self.parameters) <= PERCENT * self.parameters:
            return
        off = parameters / self.parameters - 1
        raise ConfigError(
            f"it has {parameters:,} parameters, {abs(off):.1%} {'more' if off > 0 else 'fewer'} than the budget of "
            f"{self.parameters:,}; at most {PERCENT}% is allowed, so change model.width or model.inner"
        )


def parse_budget(text: str) -> Budget:
    """`params=41M,steps=N`, `seconds=N` or nothing. K and M are thousands and millions."""
    parts: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in ("params", "steps", "seconds"):
            raise ConfigError(f"budget {text!r} has an unknown part {name!r}; use {FORMAT}")
        if name in parts:
            raise ConfigError(f"budget {text!r} sets {name} twice; set it only once")
        parts[name] = _number(number, part)
    if {"steps", "seconds"} <= parts.keys():
        raise ConfigError(f"budget {text!r} sets both steps and seconds; use only one of them")
    return Budget(parts.get("params"), parts.get("steps"), parts.get("seconds"))


def _number(text: str, part: str) -> int:
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KM]?)", text.strip(), re.ASCII | re.IGNORECASE)
    value = float(found[1]) * _SUFFIXES[found[2].upper()] if found else 0.0
    if not 1 <= value <= LARGEST or value != int(value):
        raise ConfigError(f"budget {part!r} needs an integer above 0, such as 41M, 890K or 1000; use {FORMAT}")
    return int(value)
