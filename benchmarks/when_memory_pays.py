"""Scores runs of several budgets, trained with and without memory, and draws them against time and against tokens.

    longspan train --recipe enwik8-12l-sprint --budgets 2100,4200,8400 --decay 0.15 --out RUNS/memory-512
    longspan train --recipe enwik8-sprint-without-memory --budgets 2950,4200,5900,8400,11800 --decay 0.15 \\
        --out RUNS/memory-0
    python benchmarks/when_memory_pays.py RUNS/memory-512 RUNS/memory-0 --data enwik8 --out RUNS/figures
    python benchmarks/when_memory_pays.py --from RUNS/figures/budgets.json --out RUNS/figures    # only draw

Every folder is a curve. All scores are of the same text, at temperature 1. A run that was trained with memory is scored
with each of --memories, and the best counts. A run that was trained without memory is scored in two ways: in segments
as in training, and with a window before every token (recomputed for every --stride tokens). The largest run of each
curve is also scored with all memories up to 16,384, with and without the discount.

Writes budgets.json (after every run; a second call continues), the figure `budgets` with the places where curves cross,
and the figure `memories`, loss against the memory of evaluation.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cards import usage_errors

from longspan.checkpoints.store import write_file
from longspan.data.encoded import open_corpus
from longspan.errors import DataError
from longspan.experiments.budget_curves import (
    BudgetRun,
    ScoreFile,
    compare_lines,
    lines_of,
    memory_way,
    open_budget_run,
    read_budget_runs,
    trained_with_memory,
    ways_of,
    window_way,
)
from longspan.experiments.budget_figures import draw_budgets, draw_memories
from longspan.experiments.figures.drawing import make_folder
from longspan.experiments.run_facts import portable_command, run_facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--from", dest="results", type=Path, help="a budgets.json to draw again, without the runs")
    parser.add_argument("--data")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=800_000)
    parser.add_argument("--stride", type=int, default=8, help="tokens per window; 1: a window per token, slow")
    parser.add_argument("--check-tokens", type=int, default=100_000, help="to compare the stride with 1; 0: none")
    parser.add_argument("--memories", type=lengths, default="0,128,512,1024,2048,4096")
    parser.add_argument(
        "--long", type=lengths, default="8192,16384", help="further memories, for the largest run of each curve"
    )
    parser.add_argument("--discount", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    if args.results is None and not (args.folders and args.data):
        parser.error("give the folders of runs and --data, or --from")
    if not args.memories:
        parser.error("--memories is empty; give at least one, for example 0,512")
    try:
        with usage_errors(parser):
            found = read_results(args.results) if args.results is not None else None
            make_folder(args.out)
            draw(found or measure(args), args.out)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues")
    return 0


def lengths(words: str) -> list[int]:
    found = [int(word) for word in words.split(",") if word]
    if min(found, default=0) < 0:
        raise ValueError
    return found


def read_results(path: Path) -> dict[str, Any]:
    """The contents of a budgets.json."""
    try:
        found = json.loads(path.read_bytes())
        known = {"data": str, "split": str, "tokens": int, "unit": str, "rows": list, "pairs": list}
        valid = all(isinstance(found[key], kind) for key, kind in known.items()) and lines_of(found["rows"])
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise DataError(f"{path} is not a budgets.json of this program; use one that it wrote")
    return dict(found)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The contents of budgets.json, which is written after every run."""
    runs, file = read_budget_runs(args.folders), ScoreFile(args.out / "scores.json")
    found: dict[str, Any] = {"data": args.data, "split": args.split, "tokens": args.tokens, "rows": []}
    found["command"] = portable_command(sys.argv)
    for run in runs:
        largest = run.steps == max(other.steps for other in runs if other.curve == run.curve)
        row = score_run(run, args, file, largest=largest)
        found["unit"] = row.pop("unit")
        found["rows"].append(row)
        lines = lines_of(found["rows"])
        found["pairs"] = compare_lines(lines, {label: label.partition(",")[0] for label in lines})
        write_file(args.out / "budgets.json", (json.dumps(found, indent=1) + "\n").encode())
        for one in row["scores"]:
            print(run.curve, run.steps, {key: one[key] for key in ("way", "memory", "discount", "bits")}, flush=True)
    return found


def score_run(run: BudgetRun, args: argparse.Namespace, file: ScoreFile, *, largest: bool) -> dict[str, Any]:
    loaded = open_budget_run(run, args.device, args.dtype)
    text = open_corpus(args.data, args.split, loaded.tokenizer)
    ways = ways_of(run.recipe, args.memories, args.long, args.discount, args.stride, largest=largest)
    row: dict[str, Any] = {"curve": run.curve, "run": run.folder.name, "steps": run.steps, "tokens": run.tokens}
    row |= {"seconds": run.seconds, "trained_memory": run.recipe.training_reading().memory}
    row["scores"] = [
        file.get(loaded, text.excerpt(0, args.tokens), text.fingerprint, way, args.streams) for way in ways
    ]
    if largest and args.check_tokens and not trained_with_memory(run.recipe):
        # Is a window per token better than one per stride? And a stream in which every token sees a segment?
        segment = run.recipe.training_reading().segment
        strict = [window_way(run.recipe), window_way(run.recipe, args.stride), memory_way(run.recipe, segment)]
        some = text.excerpt(0, args.check_tokens)
        row["check"] = [file.get(loaded, some, text.fingerprint, way, 1) for way in strict]
    return row | {"unit": loaded.tokenizer.unit, "run_facts": run_facts(run.folder)}


def draw(found: dict[str, Any], out: Path) -> None:
    unit = found["unit"]
    title = f"{found['data']}, {found['split']}: first {found['tokens']:,} {unit}s"
    draw_budgets(lines_of(found["rows"]), found["pairs"], out, title, unit)
    draw_memories(found["rows"], out, title, unit)
    for pair in found["pairs"]:
        places = [f"{one[pair['against']]:,.0f}" for one in pair["crossings"]]
        where = f"cross at {' and '.join(places)} {pair['against']}" if places else f"do not cross by {pair['against']}"
        end = f"; {pair['first_minus_second']:+.4f} at {pair['shared']:,.0f}" if "shared" in pair else ""
        print(f"{pair['first']} and {pair['second']} {where}{end}")


if __name__ == "__main__":
    sys.exit(main())
