"""The cost of the distributed code path with one process, and step times for the cost model in docs/scale.md.

    torchrun --standalone --nproc-per-node=1 benchmarks/processes.py --shapes 41M,277M,1.3B

Every form takes the same steps on random bytes. Forms are measured in turn, several rounds, and the fastest round
counts. One JSON line per shape and form.
"""

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path

import numpy as np
import torch

from longspan.data import Encoded
from longspan.tokenizers import ByteTokenizer
from longspan.training import run
from longspan.training.processes import ALONE, Processes, joined, own_device
from longspan.training.recipe import Recipe, build_recipe, load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
WARM_UP, STEPS = 12, 8


def shapes() -> dict[str, Recipe]:
    base, large = (load_recipe(RECIPES / f"enwik8-{name}.toml") for name in ("base", "large"))
    model = {"family": "transformer-xl", "layers": 24, "width": 2048, "heads": 16, "inner": 8192, "dropout": 0.0}
    huge = {"steps": 1000, "batch": 8, "segment": 768, "memory": 768}
    return {"41M": base, "277M": large, "1.3B": build_recipe({"model": model, "training": huge}, "1.3B")}


def text() -> Encoded:
    ids = np.random.default_rng(1).integers(0, 256, 4_000_000, dtype=np.uint8)
    return Encoded("random bytes", "train", ids, np.array([0]), ByteTokenizer(), "", len(ids))


class Form:
    """A trainer in one form: plain, ddp or fsdp; compiled or eager."""

    def __init__(self, recipe: Recipe, name: str, device: torch.device, processes: Processes) -> None:
        kind, _, eager = name.partition("-")
        changes = {"parallel": "fsdp" if kind == "fsdp" else "ddp", "compile": not eager, "cuda_graph": False}
        training = dataclasses.replace(recipe.training, **changes)
        recipe = dataclasses.replace(recipe, training=training)
        _, self.trainer = run.make_trainer(recipe, text(), device, (), ALONE if kind == "plain" else processes)
        self.name, self.device, self.best = name, device, float("inf")
        self.steps(WARM_UP)

    def steps(self, count: int) -> float:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(count):
            self.trainer.take_step()
            self.trainer._agree()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / count

    def measure(self) -> None:
        self.best = min(self.best, self.steps(STEPS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="41M,277M,1.3B")
    parser.add_argument("--forms", default="plain,ddp")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device = own_device(torch.device("cuda"))
    with joined(device) as processes:
        for shape in given.shapes.split(","):
            forms = [Form(shapes()[shape], form, device, processes) for form in given.forms.split(",")]
            for _ in range(given.rounds):
                for form in forms:
                    form.measure()
            for form in forms:
                trainer = form.trainer
                print(
                    json.dumps(
                        {
                            "shape": shape,
                            "form": form.name,
                            "ms": round(1000 * form.best, 2),
                            "tokens": trainer.streams.batch * trainer.reading.segment,
                            "parameters": trainer.model.parameter_count,
                            "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 1),
                            "device": torch.cuda.get_device_name(device),
                            "torch": torch.__version__,
                        }
                    ),
                    flush=True,
                )
            del forms, form, trainer
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
