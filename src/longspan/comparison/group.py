"""The whole of a comparison: every member trained and scored, then the group's contexts; what fails is a row too."""

import dataclasses
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.comparison import member
from longspan.comparison.contexts import measure_groups
from longspan.comparison.member import Terms
from longspan.comparison.notebook import Notebook
from longspan.data.cache import key
from longspan.errors import LongspanError
from longspan.training.recipe import Recipe

Tell = Callable[[str], None]


@dataclass
class Row:
    """A member as the table shows it: what is not known is None, and `failed` says why it is not whole."""

    name: str
    recipe: str
    family: str | None = None
    failed: str | None = None
    parameters: int | None = None
    steps: int | None = None
    score: dict[str, Any] = field(default_factory=dict)
    tokens_per_second: float | None = None
    peak_memory: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {"bits": None, "unit": None} | values.pop("score") | values


@dataclass(frozen=True)
class Comparison:
    """`contexts` holds RECL and ECL of each group that could be measured."""

    rows: list[Row]
    contexts: list[dict[str, Any]]
    notes: list[str]

    @property
    def whole(self) -> list[Row]:
        return [row for row in self.rows if row.failed is None]


class StoppedError(LongspanError):
    """A signal asked for a stop; everything up to it is saved."""

    def __init__(self, sentence: str, number: signal.Signals) -> None:
        super().__init__(sentence)
        self.number = number


def compare(
    members: dict[str, Path],
    notebook: Notebook,
    terms: Terms,
    *,
    contexts: Sequence[int] | None = None,
    targets: int | None = None,
    tell: Tell = lambda _: None,
) -> Comparison:
    """Train what is not trained, measure what is not measured, and gather all of it."""
    rows: list[Row] = []
    recipes: dict[str, Recipe] = {}
    for k, (name, file) in enumerate(members.items(), start=1):
        row = Row(name, str(file))
        rows.append(row)
        tell(f"{name} ({k} of {len(members)})")
        try:
            recipes[name] = _whole(row, file, notebook, terms, tell)
        except StoppedError:
            raise
        except LongspanError as error:
            row.failed = " ".join(str(error).splitlines())
            tell(f"{name} failed: {row.failed}")
        except Exception as error:  # a mistake of ours ends one member and not the others
            row.failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            tell(f"{traceback.format_exc()}{name} failed: {row.failed}")
    if not recipes:
        return Comparison(rows, [], [])
    tell("measuring contexts")
    # Opened anew: a model held while others train would be counted in their memory.
    opened = [member.open_member(name, recipe, notebook.folder / name, terms) for name, recipe in recipes.items()]
    found, notes = measure_groups(opened, contexts, targets, notebook.contexts)
    notebook.save()
    return Comparison(rows, found, notes)


def _whole(row: Row, file: Path, notebook: Notebook, terms: Terms, tell: Tell) -> Recipe:
    """Fills the row as far as it comes."""
    recipe = member.read_recipe(file, terms)
    row.family = recipe.family
    row.parameters = member.count_parameters(recipe)
    terms.budget.check_size(row.parameters)
    page = notebook.members.setdefault(row.name, {})
    page["recipe"] = str(file)
    notebook.save()
    out = notebook.folder / row.name
    outcome, peak = member.train(recipe, out, terms.device)
    if peak is not None:
        page["peak_memory"] = max(peak, page.get("peak_memory") or 0)
        notebook.save()
    row.steps, row.peak_memory = outcome.step, page.get("peak_memory")
    if outcome.interrupted is not None:
        said = f"stopped by {outcome.interrupted.name} after step {outcome.step} of {row.name}, which is saved"
        raise StoppedError(said, outcome.interrupted)
    row.tokens_per_second = member.training_speed(out)
    one = member.open_member(row.name, recipe, out, terms)
    settings = [dataclasses.asdict(one.loaded.model.config), dataclasses.asdict(recipe.evaluation), str(terms.dtype)]
    known_by = key(one.loaded.hash, one.held_out.fingerprint, settings, terms.tokens)
    if page.get("known_by") != known_by:
        tell(f"scoring {row.name}")
        page |= {"score": member.score(one, terms.tokens), "known_by": known_by}
        notebook.save()
    row.score = page["score"]
    return recipe
