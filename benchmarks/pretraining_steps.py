"""Steps of pre-training recipes in the training loop, on random tokens with documents of about 600.

    python benchmarks/pretraining_steps.py transfer-xlnet transfer-bert --layers 3
    python benchmarks/pretraining_steps.py transfer-xlnet --old xlnet=OLD_FILE      an older file of a family too

Prints milliseconds per step, tokens per second and the memory of the GPU: compiled, and with `--graph` also captured in
a CUDA graph. LSTMs are measured with a kernel call per piece between document starts, and with inserted steps. With
fewer layers than the recipe has, a step compiles sooner. `--json FILE` writes the same rows.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import usage_errors

from longspan.data import Encoded
from longspan.device import find_device
from longspan.nn.lstm import LSTMLayer
from longspan.tokenizers import ByteTokenizer
from longspan.training import run
from longspan.training.loop import Trainer
from longspan.training.recipe import load_recipe, value_at

RECIPES = Path(__file__).parents[1] / "recipes"
VOCABULARY = 16384
Row = dict[str, Any]


class Words(ByteTokenizer):
    """As many tokens as the shared tokenizer of the recipes has."""

    size = VOCABULARY

    def decode_bytes(self, ids: Any) -> bytes:
        return b"".join(b"%d" % token for token in ids)


def random_text(tokens: int = 8_000_000) -> Encoded:
    random = np.random.default_rng(1)
    # Squared, so that some words are frequent.
    ids = (random.random(tokens) ** 2 * VOCABULARY).astype(np.uint16)
    starts = np.concatenate([[0], np.sort(random.choice(tokens, tokens // 600, replace=False))])
    return Encoded("random words", "train", ids, np.unique(starts), Words(), "", tokens)


@contextmanager
def replaced(family: str, file: str | None) -> Iterator[None]:
    """Within this block the family is that of another file."""
    name = f"longspan.models.{family}"
    before = sys.modules.pop(name, None)
    if file is not None:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    try:
        yield
    finally:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


def measure(trainer: Trainer, given: argparse.Namespace) -> Row:
    began = time.perf_counter()
    for _ in range(4):  # compiled, captured, replayed
        trainer.take_step()
    synchronise(trainer)
    ready, times = time.perf_counter() - began, []
    for _ in range(given.rounds):
        began = time.perf_counter()
        for _ in range(given.steps):
            trainer.take_step()
        synchronise(trainer)
        times.append((time.perf_counter() - began) / given.steps)
    tokens = value_at(trainer.config.batch, trainer.step) * value_at(trainer.config.segment, trainer.step)
    seconds = statistics.median(times)
    memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0
    return {"ms": 1e3 * seconds, "tokens/s": tokens / seconds, "GiB": memory, "ready s": ready}


def synchronise(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--old", default="", help="FAMILY=FILE: measure this file of the family first")
    parser.add_argument("--graph", action="store_true", help="measure captured steps too")
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    more = [*given.set, *([f"model.layers={given.layers}"] if given.layers else [])]
    with usage_errors(parser):
        device = find_device(given.device)
        families = {name: load_recipe(RECIPES / f"{name}.toml", more).family for name in given.recipes}
    text, rows = random_text(), list[Row]()
    old, _, file = given.old.partition("=")
    for name, family in families.items():
        forms = {"old": (file, False)} if family == old else {}
        if family in ("lstm", "awd-lstm", "elmo"):
            forms["pieces"] = (None, False)
        forms["new"] = (None, False)
        if given.graph and "pieces" not in forms:
            forms["new, captured"] = (None, True)
        for form, (source, graph) in forms.items():
            with replaced(family, source):
                torch._dynamo.reset()
                LSTMLayer.inserts = False if form == "pieces" else None
                recipe = load_recipe(RECIPES / f"{name}.toml", [*more, f"training.cuda_graph={str(graph).lower()}"])
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                trainer = run.make_trainer(recipe, text, device)[1]
                rows.append({"recipe": name, "form": form, "layers": recipe.model.layers} | measure(trainer, given))
                del trainer
            shown = (f"{key} {v:.4g}" if isinstance(v, float) else f"{v!s:<16}" for key, v in rows[-1].items())
            print("  ".join(shown), flush=True)
    if given.json:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        given.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
