"""The parts of `longspan demo`: two small models trained and scored in a few minutes on a CPU."""

import bz2
import dataclasses
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from longspan.data import open_corpus
from longspan.data.encoded import Excerpt
from longspan.decoding.sampling import Sampling
from longspan.scoring.score import score
from longspan.text_model import TextModel, load
from longspan.training.dry_run import dry_run
from longspan.training.recipe import Recipe, load_recipe
from longspan.training.run import open_text

TRAINING_SECONDS = 95.0
"""Time to train the first model. The second takes the same number of steps, which are faster."""
HELD_OUT = 12_288
WITH_MEMORY, WITHOUT_MEMORY = "longspan-xl", "vanilla"
"""Folder names of the two runs."""


@dataclass(frozen=True)
class Row:
    """The score of a model or a compressor on the held-out bytes."""

    name: str
    parameters: int | None
    bits: float
    bytes_per_second: float | None


def demo_recipes(device: torch.device) -> dict[str, Recipe]:
    """The recipes of both runs by folder name, with as many steps as this machine has time for."""
    recipes = {WITH_MEMORY: load_recipe("demo"), WITHOUT_MEMORY: load_recipe("demo-vanilla")}
    first = recipes[WITH_MEMORY]
    cost = dry_run(first, open_text(first, "train"), device)
    steps = first.training.steps or 1
    steps = max(60, min(steps, int(steps * TRAINING_SECONDS / max(cost.seconds, 1e-3))))
    return {
        name: dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=steps))
        for name, recipe in recipes.items()
    }


def held_out_text() -> Excerpt:
    return open_corpus("stdlib", "test").excerpt(0, HELD_OUT)


def score_runs(out: Path, text: Excerpt, device: torch.device) -> list[Row]:
    """The model with memory as a stream, the one without with a sliding window, and two compressors."""
    xl, vanilla = (load(out / name, device=device) for name in (WITH_MEMORY, WITHOUT_MEMORY))
    names = {
        f"longspan-xl, memory {xl.reading.memory}": xl,
        f"vanilla, sliding window {vanilla.reading.segment}": vanilla,
    }
    rows = []
    for name, model in names.items():
        found = score(model.model, text)
        rows.append(Row(name, model.parameter_count, found.bits, found.scored / found.seconds))
    content = bytes(text.ids)
    for name, packed in (("xz -9", lzma.compress(content, preset=9)), ("bzip2 -9", bz2.compress(content, 9))):
        rows.append(Row(name, None, 8 * len(packed) / len(content), None))
    return rows


def continuation(model: TextModel, prompt: str, count: int) -> Iterator[str]:
    """Generated text after a prompt, piece by piece."""
    return model.stream(model.session(prompt), count, Sampling(temperature=0.7, top_p=0.95))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: the steps of a small model are too short to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
