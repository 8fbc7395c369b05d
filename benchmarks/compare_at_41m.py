"""Comparisons of 41M models on enwik8, four minutes each on one H200, collected in one JSON table.

    python benchmarks/compare_at_41m.py families --out RUNS       # eight families; RECL over contexts that all can use
    python benchmarks/compare_at_41m.py order --out RUNS          # the paper's order: memory, Shaw, without, vanilla
    python benchmarks/compare_at_41m.py ablations --out RUNS      # the sprint with one of its parts removed at a time
    python benchmarks/compare_at_41m.py seeds --best A,B --out RUNS    # two further seeds of the best two families
    python benchmarks/compare_at_41m.py families --try --out RUNS      # small models and few steps, on a CPU

Every part is one `longspan compare`, so a second call continues, and --print shows the command. RUNS/table.json has a
row per model (bits, steps, tokens/s, peak memory, RECL with its interval) and the differences of RECL between models.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

FAMILIES = "enwik8-12l-sprint " + " ".join(
    f"enwik8-sprint-{name}"
    for name in ("transformer-xl", "rotary", "compressive", "adaptive-span", "longformer", "vanilla", "lstm")
)
ORDER = "enwik8-12l-sprint enwik8-sprint-shaw enwik8-sprint-without-memory enwik8-sprint-vanilla"
SMALL = {
    "families": "demo demo-rotary demo-compressive demo-adaptive-span demo-longformer demo-vanilla demo-lstm",
    "order": "demo demo-vanilla",
    "ablations": "demo",
}
CHANGES = (
    "model.norm=post,model.final_norm=false",
    "model.norm_type=layer,model.biases=true",
    "model.qk_norm=false",
    "model.convolution=0",
    "model.activation=relu",
    "model.shared_biases=true",
    "training.optimizer=adamw,training.lr=0.0007",
    "model.dropout=0.0,training.weight_decay=0.0",
)


def command(args: argparse.Namespace) -> list[str]:
    recipes = {"families": FAMILIES, "order": ORDER, "ablations": "enwik8-12l-sprint"}.get(args.part)
    chosen = args.best.split(",") if recipes is None else (SMALL[args.part] if args.small else recipes).split()
    data, budget = ("stdlib", "steps=3") if args.small else ("enwik8", f"params=41M,seconds={args.seconds}")
    line = [
        sys.executable,
        "-m",
        "longspan",
        "compare",
        *chosen,
        "--data",
        data,
        "--budget",
        budget,
        "--json",
        "--no-report",
    ]
    line += ["--out", str(args.out / args.part), "--tokens", str(4096 if args.small else args.tokens)]
    if args.part in ("families", "order"):
        line += ["--contexts", "8:64:8" if args.small else "50:500:50"]
        line += ["--targets", str(40 if args.small else args.targets)]
    else:
        line += ["--targets", "0"]
    if args.part == "ablations":
        line += [word for change in CHANGES for word in ("--each", change)]
    if args.part == "seeds":
        line += ["--seed", "2", "--seeds", "2"]
    return line


def rows(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """A row per model. RECL is that of the first group, whose contexts all of its members can use."""
    group = found["contexts"][0] if found["contexts"] else {"recl": {}}
    keys = ("name", "family", "parameters", "steps", "bits", "method", "memory", "tokens_per_second", "peak_memory")
    return [
        {"part": part}
        | {key: member.get(key) for key in (*keys, "failed")}
        | {f"recl_{r}": lengths.get(member["name"]) for r, lengths in group["recl"].items()}
        for member in found["members"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["families", "order", "ablations", "seeds"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=200_000, help="validation bytes to score")
    parser.add_argument("--targets", type=int, default=10_000, help="for RECL")
    parser.add_argument("--best", default="enwik8-12l-sprint,enwik8-sprint-rotary", help="recipes for further seeds")
    parser.add_argument("--try", dest="small", action="store_true")
    parser.add_argument("--print", action="store_true")
    args = parser.parse_args()
    line = command(args)
    if args.print:
        print(shlex.join(line))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(line, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout)
    path = args.out / "table.json"
    table: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": [], "differences": {}}
    table["rows"] = [row for row in table["rows"] if row["part"] != args.part] + rows(found, args.part)
    table["differences"][args.part] = found["contexts"][0]["differences"] if found["contexts"] else {}
    path.write_text(json.dumps(table, indent=1) + "\n")
    for row in rows(found, args.part):
        print({key: value for key, value in row.items() if value is not None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
