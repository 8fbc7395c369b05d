"""The table of a comparison, as rows of text, and the report that opens with it."""

import hashlib
import json
from typing import Any

import torch

from longspan.experiments.compare.group import Comparison, Log, Row
from longspan.experiments.compare.results import ResultsFile
from longspan.experiments.report import report
from longspan.experiments.report.page import Section, note, table
from longspan.experiments.report.runs import read_run
from longspan.scoring.contexts import Progress

REPORT = "report.html"
SHOWN_SHARE = "0.1"
COLUMNS = ("member", "family", "parameters", "steps", "bits", "method", "tokens/s", "peak memory")


def header(found: Comparison) -> list[str]:
    return [*COLUMNS, *(f"RECL to {group['contexts'][-1]}" for group in found.contexts)]


def cells(row: Row, found: Comparison) -> list[str]:
    """A complete member as text, one cell per column of the header."""
    score = row.score
    stream = f"stream, memory {score['memory']}" if score["memory"] else "stream"
    stream += f", pointer {score['pointer']}" if score.get("pointer") else ""
    return [
        row.name,
        row.family or "",
        f"{row.parameters:,}",
        f"{row.steps:,}",
        f"{score['bits']:{'.4f' if score['bits'] < 1000 else '.3g'}} per {score['unit']}",
        stream if score["method"] == "stream" else f"sliding window of {score['segment']}",
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "" if row.peak_memory is None else f"{row.peak_memory / 2**20:,.0f} MiB",
        *(_recl(row.name, group) for group in found.contexts),
    ]


def spread_rows(found: Comparison) -> list[list[str]]:
    """A header and a row per recipe that was trained with several seeds."""
    rows = [
        [one.group, f"{one.seeds}", f"{one.bits:.4f} per {one.unit}", f"{one.deviation:.4f}"] for one in found.spreads
    ]
    return [["recipe", "seeds", "bits, mean", "standard deviation"], *rows] if rows else []


def _recl(name: str, group: dict[str, Any]) -> str:
    if name not in group["members"]:
        return ""
    length = group["recl"][SHOWN_SHARE][name]
    return f"{length['tokens']}{'+' * length['bounded']} [{length['low']}, {length['high']}]"


def remarks(found: Comparison, device: torch.device) -> list[str]:
    """What a reader of the table needs to know."""
    scored = sorted({row.score["scored"] for row in found.complete})
    memory = "of tensors on the device" if device.type == "cuda" else "of the process, Python and torch included"
    lines = [
        f"bits: of the first {' or '.join(f'{count:,}' for count in scored)} tokens with a prediction in the "
        "validation split"
    ]
    if any(row.peak_memory is not None for row in found.complete):
        lines.append(f"peak memory: in training, {memory}")
    if found.contexts:
        lines.append(f"RECL: tokens, r = {SHOWN_SHARE}, 95% interval; + means that the last context still gained")
    for row in found.complete:
        for fact, value in row.score.get("learned", {}).items():
            shown = f"{value:.2f}" if isinstance(value, float) else value
            lines.append(f"{row.name}: {fact.replace('_', ' ')} {shown}")
    return [*lines, *found.notes]


def write_report(
    found: Comparison,
    results: ResultsFile,
    device: torch.device,
    dtype: torch.dtype,
    *,
    progress: Progress | None = None,
    log: Log = lambda _: None,
) -> None:
    """Write DIR/report.html if anything in it has changed."""
    opening = _opening(found, device)
    scores = [results.members[row.name].get("known_by") for row in found.complete]
    content = hashlib.sha256(json.dumps([opening.body, scores]).encode()).hexdigest()
    path = results.folder / REPORT
    if results.report == content and path.is_file():
        return
    log("writing the report")
    runs = [read_run(results.folder / row.name) for row in found.complete]
    report.write_report(runs, path, device, dtype, progress=progress, opening=[opening])
    results.report = content
    results.save()


def _opening(found: Comparison, device: torch.device) -> Section:
    columns = header(found)
    rows = [
        cells(row, found) if row.failed is None else [row.name, "failed", *[""] * (len(columns) - 2)]
        for row in found.rows
    ]
    head, *means = spread_rows(found) or [[]]
    spread = table(head, means) if means else ""
    failures = [f"{row.name} failed: {row.failed}" for row in found.rows if row.failed is not None]
    return Section(
        "Comparison", spread + table(columns, rows) + "".join(map(note, [*failures, *remarks(found, device)]))
    )
