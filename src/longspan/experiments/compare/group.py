"""A comparison: every member trained and scored, then RECL of the group. A failed member is a row too."""

import contextlib
import dataclasses
import shlex
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspan.data.cache import key
from longspan.errors import LongspanError
from longspan.experiments.compare import member
from longspan.experiments.compare.contexts import measure_contexts
from longspan.experiments.compare.member import Setup
from longspan.experiments.compare.results import ResultsFile
from longspan.experiments.compare.variants import Spread, Variant, spreads
from longspan.experiments.run_facts import run_facts
from longspan.experiments.side_by_side import run_side_by_side
from longspan.terminal import progress_line
from longspan.training.environment import COMMAND, command
from longspan.training.recipe import Recipe

Log = Callable[[str], None]
"""Called with a line about what happens next."""


@dataclass
class Row:
    """A member in the table. Unknown values are None; `failed` is the reason why it is not complete."""

    name: str
    recipe: str
    family: str | None = None
    failed: str | None = None
    parameters: int | None = None
    steps: int | None = None
    score: dict[str, Any] = field(default_factory=dict)
    tokens_per_second: float | None = None
    peak_memory: int | None = None
    run: dict[str, Any] = field(default_factory=dict)
    """Seed, command, tokens, device and commit of the training run (`run_facts`)."""

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
    spreads: list[Spread] = field(default_factory=list)
    """Mean and standard deviation of the recipes that were trained with several seeds."""

    @property
    def complete(self) -> list[Row]:
        return [row for row in self.rows if row.failed is None]


class StoppedError(LongspanError):
    """A signal stopped the comparison. Everything up to there is saved."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.number = number


def compare(
    members: Mapping[str, Variant],
    results: ResultsFile,
    setup: Setup,
    *,
    contexts: Sequence[int] | None = None,
    targets: int | None = None,
    parallel: int = 1,
    log: Log = lambda _: None,
) -> Comparison:
    """Train and measure the parts that are missing in `results`, and return the complete comparison. `parallel` members
    are trained at the same time; scores and contexts are measured one after another. With `targets=0`, contexts are not
    measured."""
    if parallel > 1:
        _train_side_by_side(members, results, setup, parallel, log)
    rows: list[Row] = []
    recipes: dict[str, Recipe] = {}
    for k, (name, variant) in enumerate(members.items(), start=1):
        row = Row(name, str(variant.file))
        rows.append(row)
        log(f"{name} ({k} of {len(members)})")
        try:
            recipes[name] = _complete(row, variant, results, setup, log)
        except StoppedError:
            raise
        except LongspanError as error:
            row.failed = " ".join(str(error).splitlines())
            _keep_failure(row, results)
            log(f"{name} failed: {row.failed}")
        except Exception as error:  # a bug fails one member, not the others
            row.failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            _keep_failure(row, results)
            log(f"{traceback.format_exc()}{name} failed: {row.failed}")
    groups = {name: variant.group for name, variant in members.items()}
    seeds = spreads(groups, {row.name: row.score for row in rows if not row.failed})
    if not recipes or targets == 0:
        return Comparison(rows, [], [], seeds)
    log("measuring contexts")
    # Opened only now: a model that is held while others train would count towards their peak memory.
    trained = [member.open_member(name, recipe, results.folder / name, setup) for name, recipe in recipes.items()]
    with progress_line("measuring contexts"):
        found, notes = measure_contexts(trained, contexts, targets, results.contexts, results.folder)
    results.save()
    return Comparison(rows, found, notes, seeds)


def _keep_failure(row: Row, results: ResultsFile) -> None:
    """Write the reason next to what is known of a member whose training or scoring failed."""
    if row.name in results.members:
        results.members[row.name]["failed"] = row.failed
        results.save()


def _train_side_by_side(
    members: Mapping[str, Variant], results: ResultsFile, setup: Setup, parallel: int, log: Log
) -> None:
    """Train members in processes of their own. Members that fail here are tried again, alone, and reported then."""
    commands: dict[str, list[str]] = {}
    for name, variant in members.items():
        with contextlib.suppress(LongspanError):
            recipe = member.read_recipe(variant, setup)
            setup.budget.check_size(member.count_parameters(recipe))
            if not member.is_finished(recipe, results.folder / name):
                commands[name] = member.training_command(recipe, results.folder, name, setup.device)
    results.save()  # before a run makes the folder look like another one
    # A run is repeated by the command of the comparison: its own names a file in the folder of the logs.
    environment = {COMMAND: shlex.join(command())}
    run_side_by_side(commands, parallel, results.folder / member.LOGS, log, environment)


def _complete(row: Row, variant: Variant, results: ResultsFile, setup: Setup, log: Log) -> Recipe:
    """Train and score a member. Fills its row as far as it gets."""
    recipe = member.read_recipe(variant, setup)
    row.family = recipe.family
    row.parameters = member.count_parameters(recipe)
    setup.budget.check_size(row.parameters)
    entry = results.members.setdefault(row.name, {})
    entry |= {"recipe": str(variant.file), "base": variant.base}
    results.save()
    out = results.folder / row.name
    outcome, peak = member.train(recipe, out, setup.device)
    if peak is not None:
        entry["peak_memory"] = max(peak, entry.get("peak_memory") or 0)
        results.save()
    row.steps, row.peak_memory = outcome.step, entry.get("peak_memory")
    if outcome.interrupted is not None:
        message = f"stopped by {outcome.interrupted.name} after step {outcome.step} of {row.name}, which is saved"
        raise StoppedError(message, outcome.interrupted)
    row.tokens_per_second, row.run = member.training_speed(out), run_facts(out)
    if entry.get("run") != row.run or "failed" in entry:
        entry["run"] = row.run
        entry.pop("failed", None)
        results.save()
    one = member.open_member(row.name, recipe, out, setup)
    settings = [
        dataclasses.asdict(one.loaded.model.config),
        dataclasses.asdict(one.loaded.model.reading),
        str(setup.dtype),
    ]
    scored_as = key(one.loaded.hash, one.held_out.fingerprint, settings, setup.tokens)
    if entry.get("known_by") != scored_as:
        log(f"scoring {row.name}")
        with progress_line(f"scoring {row.name}") as progress:
            entry |= {"score": member.score_member(one, setup.tokens, progress), "known_by": scored_as}
        results.save()
    row.score = entry["score"]
    return recipe
