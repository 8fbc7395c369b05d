"""`longspan compare`: recipes under one budget, side by side. docs/compare.md"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.completion import recipe_values
from longspan.cli.options import DeviceName, DtypeName, Json, Set, Threads, machine, print_json
from longspan.cli.progress import progress
from longspan.cli.recl import parse_contexts
from longspan.cli.text_options import Data, Encoding, Field, data_overrides, data_path
from longspan.errors import ConfigError, TrainingError, counted

if TYPE_CHECKING:
    import torch

    from longspan.experiments.compare.group import Comparison

TOKENS = 16_384


def compare(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE", autocompletion=recipe_values, help="Recipes to compare, by name or file."),
    ],
    data: Data,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder for the runs and the report.")],
    budget: Annotated[
        str,
        typer.Option(
            "--budget", help="Budget of each run: params=41M,steps=N or params=41M,seconds=N. Each part is optional."
        ),
    ] = "",
    tokens: Annotated[
        int, typer.Option("--tokens", help="Number of tokens of the validation split to score; 0 scores all.")
    ] = TOKENS,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts",
            help="Context lengths for RECL, as FIRST:LAST:STEP in tokens. Default: ten lengths up to 1000.",
        ),
    ] = None,
    targets: Annotated[
        int | None, typer.Option("--targets", help="Number of tokens to predict for RECL; 0 skips RECL. Default: 200.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Random seed of weights and dropout, for all recipes.")
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            help="Number of seeds per recipe, counted up from --seed or 1. Prints mean and standard deviation.",
        ),
    ] = 1,
    field: Field = None,
    encoding: Encoding = None,
    set_: Set = [],  # noqa: B006 (typer copies it)
    grid: Annotated[
        list[str],
        typer.Option(
            "--grid",
            metavar="KEY=V,V,...",
            help="Train each recipe with each value. If repeated, every combination is trained.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    each: Annotated[
        list[str],
        typer.Option(
            "--each", metavar="KEY=V,...", help="Also train each recipe with only this change; can be repeated."
        ),
    ] = [],  # noqa: B006 (typer copies it)
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="K", help="Train K runs at the same time, each in its own process.")
    ] = 1,
    report: Annotated[
        bool,
        typer.Option("--report/--no-report", help="Write DIR/report.html. This takes minutes if there are many runs."),
    ] = True,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Train recipes under one budget and compare bits, speed, memory and RECL.

    Run the same command again to continue: only what is missing is computed.
    """
    from longspan.config import parse_overrides
    from longspan.experiments.compare import group
    from longspan.experiments.compare.budget import parse_budget
    from longspan.experiments.compare.member import SPLIT, Setup
    from longspan.experiments.compare.results import name_members, open_results
    from longspan.experiments.compare.table import REPORT, write_report
    from longspan.experiments.compare.variants import parse_each, parse_grid, variants
    from longspan.experiments.figures.drawing import require_matplotlib

    if report:
        require_matplotlib()
    limits = parse_budget(budget)
    lengths = None if contexts is None else parse_contexts(contexts)
    if targets is not None and targets < 0:
        raise ConfigError(f"--targets {targets} must be at least 1, or 0 for no RECL")
    if parallel < 1:
        raise ConfigError(f"--parallel {parallel} must be at least 1")
    if tokens < 2 and tokens != 0:
        raise ConfigError(f"--tokens {tokens} must be at least 2, or 0 for all of the validation split")
    where = machine(device, dtype, threads)
    results = open_results(out, limits.limit)
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} must be at least 1")
    parse_overrides(set_)  # checks them
    first = 1 if seed is None else seed
    numbers = [seed] if seeds == 1 else [first + k for k in range(seeds)]
    members = variants(name_members(recipes, results), parse_grid(grid), numbers, parse_each(each))
    precision = () if dtype == "auto" else (f"training.precision={dtype}",)
    changes = (*set_, *data_overrides(field, encoding), *precision)
    setup = Setup(data_path(data), limits, where.device, where.dtype, changes, seed, tokens)
    try:
        measured: dict[str, Any] = {"contexts": lengths, "targets": targets}
        found = group.compare(members, results, setup, parallel=parallel, log=_log, **measured)
        if not json:
            _print_table(found, where.device)  # before the report, which may take a while
            sys.stdout.flush()
        if found.complete and report:
            with progress("report", quiet=json) as watch:
                write_report(found, results, where.device, where.dtype, progress=watch, log=_log)
    except (group.StoppedError, KeyboardInterrupt) as stop:
        stopped = isinstance(stop, group.StoppedError)
        message, code = (str(stop), 128 + stop.number) if stopped else ("stopped", 130)  # type: ignore[union-attr]
        given = {"--budget": budget, "--data": data, "--out": out, "--tokens": tokens, "--contexts": contexts}
        given |= {"--targets": targets, "--seed": seed, "--device": device, "--dtype": dtype, "--threads": threads}
        given |= {"--seeds": seeds, "--set": set_, "--grid": grid, "--each": each, "--parallel": parallel}
        given |= {"--field": field, "--encoding": encoding}
        command = _command(recipes, given) + ("" if report else " --no-report")
        _log(f"{message}; continue with: {command}")
        raise typer.Exit(code) from None
    page = str(out / REPORT) if found.complete and report else None
    if json:
        about: dict[str, Any] = {"budget": limits.facts, "data": data, "split": SPLIT, "report": page}
        about |= {"notes": found.notes, "peak_memory_of": "device" if where.device.type == "cuda" else "process"}
        about |= {"seeds": [one.facts for one in found.spreads]}
        print_json({**about, "members": [row.facts for row in found.rows], "contexts": found.contexts})
    elif page:
        print(f"the report is in {page}")
    if not found.complete:
        raise TrainingError(f"{counted(len(found.rows), 'recipe')} failed; the first error is: {found.rows[0].failed}")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _command(recipes: Sequence[str], given: dict[str, Any]) -> str:
    """The command line that continues the comparison, without options that have their default."""
    defaults = {"--tokens": TOKENS, "--device": "auto", "--dtype": "auto", "--threads": 0, "--budget": "", "--seeds": 1}
    defaults |= {"--parallel": 1}
    flags = [
        word
        for flag, value in given.items()
        if value is not None and value != defaults.get(flag)
        for each in (value if isinstance(value, list) else [value])
        for word in (flag, str(each))
    ]
    return shlex.join(["longspan", "compare", *recipes, *flags])


def _print_table(found: "Comparison", device: "torch.device") -> None:
    from longspan.experiments.compare.table import cells, header, remarks, spread_rows

    shown = {row.name: cells(row, found) for row in found.complete}
    columns = header(found)
    widths = [max(map(len, column)) for column in zip(columns, *shown.values(), strict=True)]
    widths[0] = max(widths[0], *(len(row.name) for row in found.rows))
    _print_row(columns, widths)
    for row in found.rows:
        if row.failed is None:
            _print_row(shown[row.name], widths)
        else:
            print(f"{row.name:<{widths[0]}}  failed: {row.failed}")
    if means := spread_rows(found):
        print()
        sizes = [max(map(len, column)) for column in zip(*means, strict=True)]
        for line in means:
            _print_row(line, sizes)
        print()
    if found.complete:
        print("\n".join(remarks(found, device)))


def _print_row(texts: Sequence[str], widths: Sequence[int]) -> None:
    padded = [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
    print("  ".join([texts[0].ljust(widths[0]), *padded[1:]]).rstrip())
