"""Scores runs of several budgets, trained with and without memory, and draws them against time and against tokens.

    longspan train --recipe enwik8-12l-sprint --budgets 2100,4200,8400 --decay 0.15 --out RUNS/memory-512
    longspan train --recipe enwik8-sprint-without-memory --budgets 2950,4200,5900,8400,11800 --decay 0.15 \\
        --out RUNS/memory-0
    python benchmarks/when_memory_pays.py RUNS/memory-512 RUNS/memory-0 --data enwik8 --out RUNS/figures

Every folder is a curve. Each run is scored with the memory that validation prefers among --memories, the same weights
for all of them. A model that was trained without memory is also scored with a window per token, the strictest form of
"without memory". The largest run of each curve gets all memories up to 16,384. Writes budgets.json and budgets.png.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from longspan.data.encoded import open_corpus
from longspan.experiments.budget_curves import (
    crossings,
    draw_budgets,
    open_budget_run,
    read_budget_runs,
    readings,
    score_memories,
    score_window,
)
from longspan.experiments.figures.drawing import make_folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="valid")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=800_000)
    parser.add_argument("--window-tokens", type=int, default=100_000, help="for windows, which are slow; 0: none")
    parser.add_argument("--memories", default="0,128,512,1024,2048,4096")
    parser.add_argument("--long", default="8192,16384", help="further memories, for the largest run of each curve")
    parser.add_argument("--discount", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    memories, further = ([int(part) for part in text.split(",") if part] for text in (args.memories, args.long))
    runs = read_budget_runs(args.folders)
    make_folder(args.out)
    rows: list[dict[str, Any]] = []
    for run in runs:
        largest = run.steps == max(other.steps for other in runs if other.curve == run.curve)
        model = open_budget_run(run, args.device, args.dtype)
        text = open_corpus(args.data, args.split)
        wanted = [*memories, *(further if largest else [])]
        bits = {
            name: score_memories(model, text.excerpt(0, args.tokens), readings(run.recipe, lengths, b), args.streams)
            for name, lengths, b in (
                ("discount", wanted, args.discount),
                ("clamp only", [m for m in wanted if m and largest], 0.0),
            )
        }
        row: dict[str, Any] = {"curve": run.curve, "run": run.folder.name, "steps": run.steps, "tokens": run.tokens}
        row |= {"seconds": run.seconds, "best": min(bits["discount"].values()), "bits": bits}
        if args.window_tokens and not run.recipe.training_reading().memory:
            some = text.excerpt(0, args.window_tokens)
            row["window"] = score_window(model, some, run.recipe)
            same = readings(run.recipe, [run.recipe.training_reading().segment])
            row["stream_on_the_same"] = next(iter(score_memories(model, some, same).values()))
        rows.append(row)
        print(json.dumps(row), flush=True)
    curves = {name: [row for row in rows if row["curve"] == name] for name in dict.fromkeys(r["curve"] for r in rows)}
    found: dict[str, Any] = {"data": args.data, "split": args.split, "tokens": args.tokens, "rows": rows}
    if len(curves) == 2:
        for key in ("seconds", "tokens"):
            pair = [[(row[key], row["best"]) for row in each] for each in curves.values()]
            found[f"crossings_{key}"] = crossings(*pair)
            print(f"the curves cross at these {key}: {found[f'crossings_{key}'] or 'nowhere'}")
    (args.out / "budgets.json").write_text(json.dumps(found, indent=1) + "\n")
    drawn = {name: [(r["seconds"], r["tokens"], r["best"]) for r in each] for name, each in curves.items()}
    draw_budgets(drawn, args.out, f"{args.data}, {args.split}: first {args.tokens:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
