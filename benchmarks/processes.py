"""The distributed code path with one process: its losses, its cost, and step times for the cost model of docs/scale.md.

    torchrun --standalone --nproc-per-node=1 benchmarks/processes.py --out processes.json
    torchrun --standalone --nproc-per-node=1 benchmarks/processes.py --device cpu --shapes small --out processes.json

A form is `plain` (as without torchrun), `ddp` or `fsdp`, with options: `ddp+compile+muon`. First 20 steps of a small
model are compared with those of the plain form. Then speeds: forms of one shape take turns, several rounds, and the
fastest round counts. No CUDA graphs. What does not fit into `--seconds` is left out and named in the table.
"""

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import usage_errors

from longspan.data import Encoded
from longspan.device import find_device
from longspan.tokenizers import ByteTokenizer
from longspan.training import run
from longspan.training.environment import commit, hardware
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from longspan.training.processes import ALONE, Processes, joined, own_device
from longspan.training.recipe import Recipe, build_recipe, load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
COMPARED = (
    "plain+float32,ddp+float32,fsdp+float32,plain+float32+muon,ddp+float32+muon,fsdp+float32+muon,plain,ddp,fsdp,"
    "ddp+checkpoint,fsdp+checkpoint,plain+muon,fsdp+muon+checkpoint,ddp+compile,fsdp+compile"
)
TIMED = "plain,ddp,fsdp,plain+compile,ddp+compile,fsdp+compile"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.005}
"""The largest difference of a loss, in nats. In bfloat16 `fsdp` also rounds embeddings and gains."""
STEPS = 20


def shapes() -> dict[str, Recipe]:
    """Recipes by name. The 41M and 277M shapes are the paper's, with its batch."""
    base, large = (load_recipe(RECIPES / f"enwik8-{name}.toml") for name in ("base", "large"))
    model = {"family": "transformer-xl", "layers": 24, "width": 2048, "heads": 16, "inner": 8192, "dropout": 0.0}
    huge = {"steps": 1000, "batch": 8, "segment": 768, "memory": 768}
    return {
        "small": small(),
        "41M": base,
        "277M": large,
        "1.3B": build_recipe({"model": model, "training": huge}, "1.3B"),
    }


def small() -> Recipe:
    model = {"family": "transformer-xl", "layers": 3, "width": 128, "heads": 2, "inner": 256, "dropout": 0.0}
    training = {"steps": 1000, "batch": 8, "segment": 64, "memory": 64, "lr": 1e-3, "muon_lr": 0.01}
    return build_recipe({"model": model, "training": training}, "small")


def text() -> Encoded:
    """Bytes that a model can learn: each follows from the one before with probability 3/4. Documents of 700 bytes."""
    draw = np.random.default_rng(1)
    after, ids = draw.integers(0, 64, 64), draw.integers(0, 64, 1_000_000)
    fours = ids.reshape(-1, 4)
    for place in (1, 2, 3):
        fours[:, place] = after[fours[:, place - 1]]
    starts = np.arange(0, len(ids), 700)
    return Encoded("pairs", "train", ids.astype(np.uint8), starts, ByteTokenizer(), "", len(ids))


class Rows(Observer):
    """Collects the metrics of a run."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, trainer: Trainer, row: Row) -> None:  # noqa: ARG002
        self.rows.append(row)


class Form:
    """A trainer in one form."""

    def __init__(self, recipe: Recipe, name: str, device: torch.device, processes: Processes) -> None:
        kind, *options = name.split("+")
        changes: dict[str, Any] = {"parallel": "fsdp" if kind == "fsdp" else "ddp", "cuda_graph": False}
        changes |= {"compile": "compile" in options, "checkpoint_activations": "checkpoint" in options}
        changes |= {"optimizer": "muon" if "muon" in options else "adamw"}
        changes |= {"precision": "float32"} if "float32" in options else {}
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **changes))
        self.name, self.device, self.metrics, self.best = name, device, Rows(), float("inf")
        reset_peak(device)
        before, begin = allocated(device), time.perf_counter()
        members = ALONE if kind == "plain" else processes
        self.trainer = run.make_trainer(recipe, text(), device, (self.metrics,), members)[1]
        self.take(STEPS)
        self.prepared, self.gib = time.perf_counter() - begin, (peak(device) - before) / 2**30

    def take(self, count: int) -> float:
        """Seconds per step."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(count):
            self.trainer.take_step()
            self.trainer._agree()
        synchronize(self.device)
        spent = time.perf_counter() - start
        self.trainer.settle()  # so that the time of other forms does not count as that of a step
        return spent / count

    @property
    def losses(self) -> list[float]:
        return [row.loss for row in self.metrics.rows[:STEPS]]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.trainer.streams.batch * self.trainer.reading.segment


def compare(names: list[str], device: torch.device, processes: Processes, until: float) -> list[dict[str, Any]]:
    """The losses of every form against those of the plain one with the same precision and optimizer."""
    plain: dict[str, list[float]] = {}
    found: list[dict[str, Any]] = []
    for name in names:
        if time.perf_counter() > until:
            found.append({"form": name, "skipped": "no time left"})
            continue
        form = Form(small(), name, device, processes)
        kept = [option for option in name.split("+")[1:] if option in ("float32", "muon")]
        reference = plain.setdefault("+".join(kept), form.losses)
        difference = max(abs(a - b) for a, b in zip(form.losses, reference, strict=True))
        bound = TOLERANCE[form.trainer.work.precision]
        last = form.metrics.rows[-1]
        numbers = {"first": form.losses[0], "last": form.losses[-1], "difference": difference, "bound": bound}
        seen = {"mfu": last.mfu, "memory_gib": list(last.memory_gib), "prepared_s": round(form.prepared, 1)}
        found.append({"form": name, **numbers, "equal": difference <= bound, **seen})
        print(json.dumps(found[-1]), flush=True)
        del form
        forget(device)
    return found


def measure(
    shape: str, names: list[str], rounds: int, device: torch.device, processes: Processes, until: float
) -> list[dict[str, Any]]:
    """Speed and memory of the forms of a shape."""
    forms, found = list[Form](), list[dict[str, Any]]()
    for name in names:
        if time.perf_counter() > until:
            found.append({"shape": shape, "form": name, "skipped": "no time left"})
            continue
        forms.append(Form(shapes()[shape], name, device, processes))
        print(shape, name, f"ready after {forms[-1].prepared:.0f} s", flush=True)
    count = max(1, min(8, int(1 / max(form.take(1) for form in forms)))) if forms else 0
    for _ in range(rounds):
        for form in forms:
            form.best = min(form.best, form.take(count))
    plain = {form.name.partition("+")[2]: form.best for form in forms if form.name.startswith("plain")}
    for form in forms:
        last = form.metrics.rows[-1]
        ratio = form.best / plain.get(form.name.partition("+")[2], form.best)
        numbers = {"ms": round(1000 * form.best, 2), "tokens_per_second": round(form.tokens / form.best)}
        seen = {"mfu": last.mfu, "memory_gib": round(form.gib, 2), "prepared_s": round(form.prepared, 1)}
        facts = {"tokens": form.tokens, "parameters": form.trainer.model.parameter_count}
        found.append({"shape": shape, "form": form.name, **numbers, "against_plain": round(ratio, 4), **seen, **facts})
    del forms
    forget(device)
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table(found: dict[str, Any]) -> str:
    lines = [f"{'form':24} {'first':>8} {'last':>8} {'difference':>11} {'bound':>8}"]
    for row in found["losses"]:
        numbers = row.get("skipped") or (
            f"{row['first']:8.4f} {row['last']:8.4f} {row['difference']:11.2e} {row['bound']:8.0e} "
            f"{'equal' if row['equal'] else 'DIFFERENT'}"
        )
        lines.append(f"{row['form']:24} {numbers}")
    lines.append(f"{'shape and form':24} {'ms':>8} {'tokens/s':>10} {'/ plain':>8} {'mfu':>7} {'GiB':>6}")
    for row in found["speed"]:
        numbers = row.get("skipped") or (
            f"{row['ms']:8.2f} {row['tokens_per_second']:10,} {row['against_plain']:8.3f} {row['mfu'] or 0:7.3f} "
            f"{row['memory_gib']:6.2f}"
        )
        lines.append(f"{row['shape'] + ' ' + row['form']:24} {numbers}")
    return "\n".join([*lines, f"{found['device']}, torch {found['torch']}, {found['seconds']:.0f} s in all"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="41M")
    parser.add_argument("--forms", default=TIMED)
    parser.add_argument("--compared", default=COMPARED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begin = time.perf_counter()
    with usage_errors(parser):
        device = own_device(find_device(given.device))
    found: dict[str, Any] = {"device": hardware(device), "torch": torch.__version__, "commit": commit()}
    with joined(device) as processes:
        names = [name for name in given.compared.split(",") if name]
        # A half for the losses, so that the speeds are measured in any case.
        found["losses"] = compare(names, device, processes, begin + given.seconds / 2)
        found["speed"] = []
        for shape in given.shapes.split(","):
            until = begin + given.seconds
            found["speed"] += measure(shape, given.forms.split(","), given.rounds, device, processes, until)
    found["seconds"] = round(time.perf_counter() - begin, 1)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
