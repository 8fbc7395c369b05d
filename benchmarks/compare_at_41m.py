"""Comparisons of 41M models on enwik8, four minutes each on one H200, collected in one JSON table.

    python benchmarks/compare_at_41m.py families --out RUNS       # eight families; RECL over contexts that all can use
    python benchmarks/compare_at_41m.py order --out RUNS          # the paper's order: memory, Shaw, without, vanilla
    python benchmarks/compare_at_41m.py ablations --out RUNS      # the sprint with one of its parts removed at a time
    python benchmarks/compare_at_41m.py seeds --best A,B --out RUNS    # two further seeds of the best two families
    python benchmarks/compare_at_41m.py families --some 1:2 --out RUNS     # only the first two families, without RECL
    python benchmarks/compare_at_41m.py families --some 1:4 --recl --out RUNS     # half of them, and RECL of these
    python benchmarks/compare_at_41m.py families --try --out RUNS      # the same recipes, tiny and for 6 steps

Every part is one `longspan compare`, and --print shows the command. All parts share the folder RUNS/runs, so a model
that occurs in two of them is trained once, and a second call continues. A run that is stopped in the middle loses the
time of a second compilation from its budget, so stop between runs: --some trains only some of them in this call.
RUNS/table.json has a row per model (bits, steps, tokens/s, peak memory, seed, command) and RECL with the differences
between models. It is written at the end of a call, also of one that was stopped. RECL of models from two machines:
`longspan recl --losses A/runs/losses-X.npz --losses B/runs/losses-Y.npz`.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from longspan.checkpoints.store import write_file
from longspan.experiments.compare.results import FILE
from longspan.experiments.side_by_side import run_command
from longspan.training.recipe import load_recipe

SPRINT = "enwik8-12l-sprint"
FAMILIES = [
    SPRINT,
    *(
        f"enwik8-sprint-{name}"
        for name in ("transformer-xl", "rotary", "compressive", "adaptive-span", "longformer", "vanilla", "lstm")
    ),
]
ORDER = [SPRINT, "enwik8-sprint-shaw", "enwik8-sprint-without-memory", "enwik8-sprint-vanilla"]
CHANGES = [
    "model.norm=post,model.final_norm=false",
    "model.norm_type=layer,model.biases=true",
    "model.qk_norm=false",
    "model.convolution=0",
    "model.activation=relu",
    "model.shared_biases=true",
    "training.optimizer=adamw,training.lr=0.0007",
    "model.dropout=0.0,training.weight_decay=0.0",
]
TINY = {"model.layers": 2, "model.width": 32, "training.batch": 2, "training.segment": 24, "training.warmup": 2}
TINY_PARTS: dict[str, dict[str, Any]] = {
    "compressive": {"model.compressed": 24, "model.rate": 3},
    "adaptive-span": {"model.span": 48, "model.ramp": 8},
    "longformer": {"model.window": [8, 16], "model.dilation": [[1], [1, 2]], "training.segment": 48},
}


def tiny_recipe(name: str, folder: Path) -> str:
    """A recipe with all of its parts and the size of a toy, as a file."""
    recipe = load_recipe(name)
    keys: dict[str, Any] = TINY | ({} if recipe.family == "lstm" else {"model.heads": 2, "model.inner": 32})
    if recipe.training.memory:
        keys |= {"training.memory": 24}
    if recipe.evaluation.memory:
        keys |= {"evaluation.memory": 48, "evaluation.segment": 48}
    else:
        keys |= {"evaluation.segment": 24}
    if recipe.evaluation.clamp:
        keys |= {"evaluation.clamp": 47}
    if getattr(recipe.model, "max_distance", 0):
        keys |= {"model.max_distance": 47}
    small = load_recipe(name, [f"{key}={value}" for key, value in (keys | TINY_PARTS.get(recipe.family, {})).items()])
    path = folder / f"{name}.toml"
    write_file(path, small.to_toml().encode())
    return str(path)


def command(args: argparse.Namespace) -> list[str]:
    """The `longspan compare` of a part."""
    first, last = (int(word) if word else None for word in (args.some or ":").split(":"))
    some = slice(None if first is None else first - 1, last)
    parts = {"families": FAMILIES, "order": ORDER, "ablations": [SPRINT]}
    chosen = parts.get(args.part) or args.best.split(",")
    chosen = chosen if args.part == "ablations" else chosen[some]
    if args.small:
        chosen = [tiny_recipe(name, args.out / "recipes") for name in chosen]
    data, budget = ("stdlib", "steps=6") if args.small else ("enwik8", f"params=41M,seconds={args.seconds}")
    line = [sys.executable, "-m", "longspan", "compare", *chosen, "--data", args.data or data]
    line += ["--budget", args.budget or budget, "--json", "--no-report", "--out", str(args.out / "runs")]
    line += ["--tokens", str(2048 if args.small else args.tokens)]
    if args.part in ("families", "order") and (args.some is None or args.recl):
        line += ["--contexts", "4:24:4" if args.small else "50:500:50"]
        line += ["--targets", str(40 if args.small else args.targets)]
    else:
        line += ["--targets", "0"]
    if args.part == "ablations":
        line += [word for change in CHANGES[some] for word in ("--each", change)]
    if args.part == "seeds":
        line += ["--seed", "2", "--seeds", "2"]
    return line + [word for pair in args.set for word in ("--set", pair)]


def collect(runs: Path) -> dict[str, Any]:
    """The contents of table.json, from the results in a folder of `longspan compare`."""
    path = runs / FILE
    found = json.loads(path.read_bytes()) if path.is_file() else {"members": {}, "contexts": {}}
    rows = []
    for name, entry in found["members"].items():
        row = {"name": name, "failed": entry.get("failed"), "peak_memory": entry.get("peak_memory")}
        rows.append(row | entry.get("score", {"bits": None}) | {"run": entry.get("run")})
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["bits"] is not None:
            groups.setdefault(str(row["name"]).partition("--seed-")[0], []).append(row)
    seeds = [
        {"name": name, "seeds": [row["run"]["seed"] for row in each], "bits": fmean(bits), "deviation": stdev(bits)}
        for name, each in groups.items()
        if len(bits := [row["bits"] for row in each]) > 1
    ]
    return {"rows": rows, "seeds": seeds, "contexts": list(found["contexts"].values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["families", "order", "ablations", "seeds"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--budget", help="another budget for longspan compare, for example steps=6")
    parser.add_argument("--data", help="another text; default: enwik8")
    parser.add_argument("--tokens", type=int, default=200_000, help="validation bytes to score")
    parser.add_argument("--targets", type=int, default=10_000, help="for RECL")
    parser.add_argument("--best", default=f"{SPRINT},enwik8-sprint-rotary", help="recipes for further seeds")
    parser.add_argument("--some", metavar="FIRST:LAST", help="only these recipes or changes, counted from 1; no RECL")
    parser.add_argument("--recl", action="store_true", help="measure RECL with --some too")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--try", dest="small", action="store_true")
    parser.add_argument("--print", action="store_true")
    args = parser.parse_args()
    line = command(args)
    if args.print:
        print(shlex.join(line))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        code = run_command(line, stdout=subprocess.DEVNULL)
    except KeyboardInterrupt:
        code = 130
    table = collect(args.out / "runs")
    write_file(args.out / "table.json", (json.dumps(table, indent=1) + "\n").encode())
    for row in table["rows"]:
        run = row["run"] or {}
        result = "not scored" if row["bits"] is None else f"{row['bits']:.4f} bits"
        print(row["name"], row["failed"] or result, f"{run.get('steps', 0):,} steps", sep=", ")
    for one in table["seeds"]:
        print(f"{one['name']}, {len(one['seeds'])} seeds: {one['bits']:.4f} bits, deviation {one['deviation']:.4f}")
    return code


if __name__ == "__main__":
    sys.exit(main())
