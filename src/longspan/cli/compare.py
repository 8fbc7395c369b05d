"""`longspan compare`: rivals under one budget, side by side."""

import hashlib
import json as jsons
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import DeviceName, DtypeName, Json, Machine, Threads, machine, print_json
from longspan.cli.progress import progress
from longspan.cli.recl import parse_contexts
from longspan.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from longspan.analysis.page import Section
    from longspan.comparison.group import Comparison, Row
    from longspan.comparison.notebook import Notebook

REPORT = "report.html"
TOKENS = 16_384
SHOWN_SHARE = "0.1"
HEAD = ("member", "family", "parameters", "steps", "bits", "read as", "tokens/s", "peak memory")


def compare(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Recipes by name or file: the group.")],
    data: Annotated[str, typer.Option("--data", metavar="NAME|PATH", help="A corpus, file or folder for all of them.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder for the runs and the report.")],
    budget: Annotated[
        str, typer.Option("--budget", help="params=41M,steps=N or params=41M,seconds=N; any part may be left out.")
    ] = "",
    tokens: Annotated[
        int, typer.Option("--tokens", help="Score so many tokens of the validation split; 0 is all of it.")
    ] = TOKENS,
    contexts: Annotated[
        str | None, typer.Option("--contexts", help="Of RECL: FIRST:LAST:STEP in tokens; ten steps to 1000.")
    ] = None,
    targets: Annotated[int | None, typer.Option("--targets", help="Of RECL: tokens to predict; 200.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of weights and dropout, for all of them.")] = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Train recipes under one budget; bits, speed, memory and RECL in one table and one report. Again: only what is
    new."""
    from longspan.analysis.drawing import require_matplotlib
    from longspan.comparison import group
    from longspan.comparison.budget import parse_budget
    from longspan.comparison.member import SPLIT, Terms
    from longspan.comparison.notebook import name_members, open_notebook

    require_matplotlib()
    spent = parse_budget(budget)
    lengths = None if contexts is None else parse_contexts(contexts)
    if targets is not None and targets < 1:
        raise ConfigError(f"--targets {targets} must be at least 1")
    if tokens < 2 and tokens != 0:
        raise ConfigError(f"--tokens {tokens} must be at least 2, or 0 for all of the validation split")
    where = machine(device, dtype, threads)
    notebook = open_notebook(out, spent.limit)
    members = name_members(recipes, notebook)
    precision = () if dtype == "auto" else (f"training.precision={dtype}",)
    terms = Terms(data, spent, where.device, where.dtype, precision, seed, tokens)
    try:
        found = group.compare(members, notebook, terms, contexts=lengths, targets=targets, tell=_tell)
        if not json:
            _print_table(found, where)  # before the report, which may take a while
            sys.stdout.flush()
        if found.whole:
            _write_report(found, notebook, where, quiet=json)
    except (group.StoppedError, KeyboardInterrupt) as stop:
        said, code = (str(stop), 128 + stop.number) if isinstance(stop, group.StoppedError) else ("stopped", 130)
        given = {"--budget": budget, "--data": data, "--out": out, "--tokens": tokens, "--contexts": contexts}
        given |= {"--targets": targets, "--seed": seed, "--device": device, "--dtype": dtype, "--threads": threads}
        print(f"{said}; go on with: {_command(recipes, given)}", file=sys.stderr)
        raise typer.Exit(code) from None
    page = str(out / REPORT) if found.whole else None
    if json:
        about: dict[str, Any] = {"budget": spent.facts, "data": data, "split": SPLIT, "report": page}
        about |= {"notes": found.notes, "peak_memory_of": "device" if where.device.type == "cuda" else "process"}
        print_json({**about, "members": [row.facts for row in found.rows], "contexts": found.contexts})
    elif page:
        print(f"the report is in {page}")
    if not found.whole:
        raise TrainingError(f"none of the {len(found.rows)} members is whole; {found.rows[0].failed}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _command(recipes: Sequence[str], given: dict[str, Any]) -> str:
    """The same command line again, less what was not given."""
    usual = {"--tokens": TOKENS, "--device": "auto", "--dtype": "auto", "--threads": 0, "--budget": ""}
    flags = [
        word
        for flag, value in given.items()
        if value is not None and value != usual.get(flag)
        for word in (flag, str(value))
    ]
    return shlex.join(["longspan", "compare", *recipes, *flags])


def _cells(row: "Row", found: "Comparison") -> list[str]:
    score = row.score
    how = f"a stream, memory {score['memory']}" if score["memory"] else "a stream"
    how += f", copying from {score['copy']}" if score.get("copy") else ""
    return [
        row.name,
        row.family or "",
        f"{row.parameters:,}",
        f"{row.steps:,}",
        f"{score['bits']:{'.4f' if score['bits'] < 1000 else '.3g'}} per {score['unit']}",
        how if score["read"] == "stream" else f"a window of {score['segment']}",
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "" if row.peak_memory is None else f"{row.peak_memory / 2**20:,.0f} MiB",
        *(_length(row.name, group) for group in found.contexts),
    ]


def _length(name: str, group: dict[str, Any]) -> str:
    if name not in group["members"]:
        return ""
    length = group["recl"][SHOWN_SHARE][name]
    return f"{length['tokens']}{'+' * length['bounded']} [{length['low']}, {length['high']}]"


def _head(found: "Comparison") -> list[str]:
    return [*HEAD, *(f"RECL to {group['contexts'][-1]}" for group in found.contexts)]


def _remarks(found: "Comparison", where: Machine) -> list[str]:
    """What has to be known to read the table."""
    cuda = where.device.type == "cuda"
    scored = sorted({row.score["scored"] for row in found.whole})
    remarks = [
        f"bits: of held-out text, the first {' or '.join(f'{count:,}' for count in scored)} tokens of the validation "
        "split that can be predicted",
        "peak memory: in training, "
        + ("of tensors on the device" if cuda else "of the whole process, Python and torch in it"),
    ]
    if found.contexts:
        remarks.append(f"RECL: tokens, r = {SHOWN_SHARE}, 95% interval; + where the contexts ended before the gain did")
    for row in found.whole:
        for what, value in row.score.get("learned", {}).items():
            shown = f"{value:.2f}" if isinstance(value, float) else value
            remarks.append(f"{row.name}: {what.replace('_', ' ')} {shown}")
    return [*remarks, *found.notes]


def _print_table(found: "Comparison", where: Machine) -> None:
    rows = [_head(found), *(_cells(row, found) for row in found.whole)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(widths[0], *(len(row.name) for row in found.rows))
    lines = dict(zip([None, *(row.name for row in found.whole)], rows, strict=True))
    for name in [None, *(row.name for row in found.rows)]:
        if name in lines:
            texts = [text.rjust(width) for text, width in zip(lines[name], widths, strict=True)]
            print("  ".join([lines[name][0].ljust(widths[0]), *texts[1:]]).rstrip())
        else:
            failed = next(row.failed for row in found.rows if row.name == name)
            print(f"{name:<{widths[0]}}  failed: {failed}")
    if found.whole:
        for remark in _remarks(found, where):
            print(remark)


def _opening(found: "Comparison", where: Machine) -> "Section":
    from longspan.analysis.page import Section, note, table

    head = _head(found)
    rows = [
        _cells(row, found) if row.failed is None else [row.name, "failed", *[""] * (len(head) - 2)]
        for row in found.rows
    ]
    failures = [f"{row.name} failed: {row.failed}" for row in found.rows if row.failed is not None]
    return Section("Comparison", table(head, rows) + "".join(map(note, [*failures, *_remarks(found, where)])))


def _write_report(found: "Comparison", notebook: "Notebook", where: Machine, *, quiet: bool) -> None:
    """Written anew only where something of it has changed."""
    from longspan.analysis.report import build_report
    from longspan.analysis.runs import read_run
    from longspan.checkpoints.store import write_file

    opening = _opening(found, where)
    pages = [notebook.members[row.name].get("known_by") for row in found.whole]
    known_by = hashlib.sha256(jsons.dumps([opening.body, pages]).encode()).hexdigest()
    path = notebook.folder / REPORT
    if notebook.report == known_by and path.is_file():
        return
    _tell("writing the report")
    runs = [read_run(notebook.folder / row.name) for row in found.whole]
    with tempfile.TemporaryDirectory(prefix="longspan-compare-") as scratch, progress("report", quiet=quiet) as watch:
        content = build_report(runs, Path(scratch), where.device, where.dtype, watch=watch, opening=[opening])
    write_file(path, content.encode("utf-8"))
    notebook.report = known_by
    notebook.save()
