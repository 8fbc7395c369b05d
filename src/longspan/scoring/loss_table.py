"""Loss tables: the loss of each model of a group on each target with each length of context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from longspan.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class LossTable:
    """`losses[i, k, t]` is the loss of target t for model `names[i]`, given the `contexts[k]` tokens before it."""

    names: tuple[str, ...]
    contexts: tuple[int, ...]
    losses: NDArray[np.float64]
    passage: str = ""
    """Identifies the text and its targets; empty in a table of another program."""

    def __post_init__(self) -> None:
        _check_names(self.names)
        check_contexts(self.contexts)
        shape = (len(self.names), len(self.contexts))
        if self.losses.ndim != 3 or self.losses.shape[:2] != shape or not self.losses.shape[2]:
            raise DataError(
                f"the losses have shape {list(self.losses.shape)}; {shape[0]} models and {shape[1]} contexts need "
                f"[{shape[0]}, {shape[1]}, targets]"
            )
        missing = np.argwhere(~np.isfinite(self.losses))
        if len(missing):
            i, k, t = missing[0]
            raise DataError(
                f"{len(missing)} of the {self.losses.size} losses are missing or not finite, the first for "
                f"{self.names[i]!r} at context {self.contexts[k]}, target {t}; a table must be complete"
            )

    @property
    def targets(self) -> int:
        return self.losses.shape[2]

    @property
    def below_zero(self) -> int:
        """Number of negative losses. Many of them mean that log-probabilities were stored instead."""
        return int((self.losses < -1e-6).sum())

    def at(self, contexts: Sequence[int]) -> "LossTable":
        """The same table with some of its contexts only."""
        if unknown := sorted(set(contexts) - set(self.contexts)):
            known = ", ".join(map(str, self.contexts))
            raise ConfigError(f"context {unknown[0]} is not in the table; it has {known}")
        indices = [self.contexts.index(context) for context in contexts]
        return replace(self, contexts=tuple(contexts), losses=self.losses[:, indices])

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            names, contexts, passage = map(np.array, (self.names, self.contexts, self.passage))
            np.savez(file, names=names, contexts=contexts, losses=self.losses, passage=passage)


def load_table(path: Path) -> LossTable:
    """The table in an .npz file with `names`, `contexts` and `losses[model, context, target]`, from any program."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := sorted({"names", "contexts", "losses"} - set(getattr(file, "files", []))):
                raise DataError(f"{path} has no array {missing[0]!r}; a loss table needs names, contexts and losses")
            names, contexts, losses = file["names"], file["contexts"], file["losses"]
            passage = str(file["passage"]) if "passage" in file.files else ""
    except (OSError, ValueError, TypeError, EOFError, AttributeError, BadZipFile) as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else "it is not an .npz of plain arrays"
        )
        raise DataError(f"the loss table {path} cannot be read: {reason}") from None
    if names.dtype.kind not in "US":
        raise DataError(f"the names in {path} have dtype {names.dtype}; store them as np.array([...], dtype=str)")
    names = np.char.decode(names, "utf-8", "replace") if names.dtype.kind == "S" else names
    if names.ndim != 1 or contexts.ndim != 1 or losses.dtype.kind not in "fiu":
        raise DataError(f"{path} needs one-dimensional names and contexts, and numeric losses")
    return LossTable(tuple(map(str, names)), _integers(contexts, path), losses.astype(np.float64), passage)


def join_tables(tables: Mapping[str, LossTable]) -> LossTable:
    """One table with the models of all tables, which must have the same text, contexts and targets. Models with equal
    names get the key of their table in front."""
    first, *others = tables.values()
    for other in others:
        if (other.contexts, other.targets) != (first.contexts, first.targets):
            shown = (f"{t.targets} targets at contexts {', '.join(map(str, t.contexts))}" for t in (other, first))
            raise DataError(
                f"the loss tables of {other.names[0]} and {first.names[0]} differ: {' and '.join(shown)}; measure all "
                "models with the same contexts and targets"
            )
    passages = {table.passage: key for key, table in tables.items() if table.passage}
    if len(passages) > 1:
        named = " and ".join(list(passages.values())[:2])
        raise DataError(f"{named} have losses of different texts or targets; measure all models on the same ones")
    every = [name for table in tables.values() for name in table.names]
    names = tuple(
        name if every.count(name) == 1 else f"{key}/{name}" for key, table in tables.items() for name in table.names
    )
    return LossTable(names, first.contexts, np.concatenate([t.losses for t in tables.values()]), "".join(passages))


def check_contexts(contexts: Sequence[int]) -> None:
    """Contexts must be at least two, positive and increasing."""
    shown = ", ".join(map(str, contexts))
    if len(contexts) < 2:
        raise ConfigError(f"contexts=[{shown}] must have at least two lengths, for example [100, 200]")
    if contexts[0] < 1 or any(b <= a for a, b in pairwise(contexts)):
        raise ConfigError(f"contexts=[{shown}] must be positive and increasing")


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise DataError("the table has 0 names; it needs at least one model")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two models are called {repeated[0]!r}; names must be unique")


def _integers(values: NDArray[Any], path: Path) -> tuple[int, ...]:
    if values.dtype.kind not in "iuf" or not np.all(np.isfinite(values)) or np.any(values != np.floor(values)):
        raise DataError(f"the contexts of {path} must be integers: numbers of tokens")
    return tuple(int(value) for value in values)
