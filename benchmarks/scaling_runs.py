"""Trains the models of a scaling law, several at a time on one GPU, each for several budgets as decays of one run.

    python benchmarks/scaling_runs.py RUNS                         # 13 shapes with and without memory, on enwik8
    python benchmarks/scaling_runs.py RUNS --print                 # only print the commands
    longspan scaling RUNS --out RUNS/figures                       # the fits and the figure

The folder of a run says memory, layers and width: RUNS/memory-512--12x512/steps-3200. A second call continues. Large
models start first, because the last one to end alone would leave the GPU idle. With NVIDIA's MPS, kernels of several
processes run at the same time: start `nvidia-cuda-mps-control -d` before.
"""

import argparse
import shlex
import sys
from pathlib import Path

from longspan.checkpoints.store import locate
from longspan.experiments.side_by_side import run_side_by_side
from longspan.training.budgets import budget_folder

# Layers and width: 0.1M to 41M parameters without embeddings. Heads have 32 or 64 units, which the fused kernel needs.
SHAPES = "2x64 4x64 3x96 3x128 4x160 4x192 4x256 6x256 6x320 6x384 8x384 8x448 12x512"
BUDGETS = "400,800,1600,3200"


def command(args: argparse.Namespace, shape: str, memory: int, out: Path) -> list[str]:
    layers, width = map(int, shape.split("x"))
    head = 64 if width % 64 == 0 and width >= 128 else 32
    longest = memory + args.segment - 1  # the longest distance of training, which evaluation uses too
    keys = {"model.layers": layers, "model.width": width, "model.heads": max(1, width // head)}
    keys |= {"training.memory": memory, "training.segment": args.segment, "training.seed": args.seed}
    keys |= {"evaluation.memory": longest + 1, "evaluation.clamp": longest}
    given = [*(f"{key}={value}" for key, value in keys.items()), *args.set]
    sets = [word for pair in given for word in ("--set", pair)]
    budgets = ["--budgets", args.budgets, "--decay", str(args.decay)]
    where = ["--recipe", args.recipe, "--data", args.data, "--out", str(out)]
    return [sys.executable, "-m", "longspan", "train", *where, *budgets, *sets]


def is_trained(out: Path, budgets: list[int]) -> bool:
    """Whether all budgets of a shape are finished, without starting a process that would find nothing to do."""
    return all(locate(budget_folder(out, steps) / f"checkpoint-{steps}") is not None for steps in budgets)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--recipe", default="scaling")
    parser.add_argument("--data", default="enwik8")
    parser.add_argument("--shapes", default=SHAPES, help="LAYERSxWIDTH, separated by spaces")
    parser.add_argument("--memories", default="512 0", help="memory in training, separated by spaces")
    parser.add_argument("--segment", type=int, default=512)
    parser.add_argument("--budgets", default=BUDGETS, help="steps")
    parser.add_argument("--decay", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1111)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--print", action="store_true")
    args = parser.parse_args()
    commands = {
        name: command(args, shape, int(memory), args.runs / name)
        for shape in reversed(args.shapes.split())
        for memory in args.memories.split()
        for name in [f"memory-{memory}--{shape}"]
    }
    if args.print:
        print("\n".join(map(shlex.join, commands.values())))
        return 0
    steps = [int(word) for word in args.budgets.split(",")]
    missing = {name: line for name, line in commands.items() if not is_trained(args.runs / name, steps)}
    codes = run_side_by_side(missing, args.parallel, args.runs / "logs", lambda line: print(line, flush=True))
    failed = [name for name, code in codes.items() if code]
    print(f"{len(commands) - len(failed)} of {len(commands)} shapes are trained" + f"; failed: {failed}" * bool(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues")
