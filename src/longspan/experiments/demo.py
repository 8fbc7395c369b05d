"""The parts of `longspan demo`: what memory is worth to the bundled model, and a small model that learns.

Steps, seeds and texts are fixed, so the conclusion is the same on every machine, and only the time differs.
"""

import bz2
import lzma
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from longspan.bundled import PAGE
from longspan.decoding.sampling import Sampling
from longspan.experiments.figures.memory_figure import MemoryCurve, measure_memories
from longspan.experiments.stories import stories, story
from longspan.scoring.losses import Progress
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer
from longspan.training import run
from longspan.training.ledger import Row as LedgerRow
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from longspan.training.recipe import Recipe, build_recipe

MEMORIES = (16, 64, 256, 1024)
STEPS, SHOWN_STEPS = 300, (40, 100, 300)
SAMPLE = 220
STORY_MEMORIES = (16, 64, 256)
TRAINING_BYTES, HELD_OUT_BYTES = 400_000, 12_000
OPENING = "Mira had a"
TRAINING = {
    "model": {
        "family": "longspan-xl",
        "layers": 3,
        "width": 96,
        "heads": 3,
        "inner": 384,
        "convolution": 4,
        "dropout": 0.0,
    },
    "training": {
        "steps": STEPS,
        "batch": 16,
        "segment": 64,
        "memory": 192,
        "optimizer": "muon",
        "lr": 0.002,
        "muon_lr": 0.02,
        "schedule": "cosine",
        "warmup": 20,
        "clip": 1.0,
        "keep": 1,
        "validate_every": 0,
    },
    "evaluation": {"memory": 256, "clamp": 255, "same_length": True},
}


@dataclass(frozen=True)
class Row:
    """A model or a compressor, and its bits per byte of a text."""

    name: str
    bits: float
    parameters: int | None = None
    """None for a compressor."""


def compressors(content: bytes) -> list[Row]:
    """What general compressors make of a text: xz, bzip2, and brotli if it is installed."""
    packed = {"xz -9": lzma.compress(content, preset=9), "bzip2 -9": bz2.compress(content, 9)}
    try:
        import brotli

        packed["brotli -11"] = brotli.compress(content, quality=11)
    except ImportError:
        pass
    return [Row(name, 8 * len(data) / len(content)) for name, data in packed.items()]


def rows_of(model: TextModel, curve: MemoryCurve, name: str) -> list[Row]:
    """One row per memory length."""
    size = model.parameter_count
    return [
        Row(f"{name}, memory {memory:,}", bits, size) for memory, bits in zip(curve.memories, curve.bits, strict=True)
    ]


def memory_curve(model: TextModel, progress: Progress | None = None) -> MemoryCurve:
    """The loss of the page with longer and longer memories."""
    return measure_memories(model.model, model.tokenizer.encode(PAGE.read_bytes()), MEMORIES, progress=progress)


def training_recipe(folder: Path) -> Recipe:
    """The recipe of the small model. Writes its text to `folder`."""
    path = folder / "stories.txt"
    path.write_text(stories(TRAINING_BYTES, seed=1), encoding="utf-8")
    return build_recipe(TRAINING | {"data": {"corpus": str(path), "tokenizer": "bytes"}}, "stories")


def held_out_stories() -> str:
    """Stories that are not part of the training text."""
    return stories(HELD_OUT_BYTES, seed=2)


@dataclass(frozen=True)
class Moment:
    """What the model does after some steps."""

    step: int
    bits: float
    """Bits per byte of held-out stories."""
    text: str


class Watch(Observer):
    """Keeps the training loss of every step. Before the first step and after some steps it scores held-out stories and
    generates a sample."""

    def __init__(self, show: Callable[[Moment], None]) -> None:
        self.show = show
        self.curve: list[float] = []
        """Training bits per byte of every step."""
        self.moments: list[Moment] = []

    def begin(self, trainer: Trainer) -> None:
        self.look(trainer)

    def row(self, trainer: Trainer, row: LedgerRow) -> None:  # noqa: ARG002
        self.curve.append(row.bits)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step in SHOWN_STEPS:
            self.look(trainer)

    def look(self, trainer: Trainer) -> None:
        training = trainer.model.training
        model = TextModel(trainer.model, ByteTokenizer())
        bits = model.score(held_out_stories()).bits
        sample = "".join(continuation(model, f"{story(Random(3))}{OPENING}", SAMPLE, temperature=0.6))
        trainer.model.train(training)
        readable = "".join(c if (c.isprintable() and c != "\ufffd") or c == "\n" else "." for c in sample)
        lines = readable.rpartition("\n")[0] or readable  # complete lines, once there are any
        self.moments.append(Moment(trainer.step, bits, OPENING + lines))
        self.show(self.moments[-1])


def train_small(device: torch.device, show: Callable[[Moment], None]) -> tuple[TextModel, Watch]:
    """Train the small model; `show` is called with every moment."""
    watch = Watch(show)
    with tempfile.TemporaryDirectory(prefix="longspan-demo-") as folder:
        recipe = training_recipe(Path(folder))
        text = run.open_text(recipe, "train")
        _, trainer = run.make_trainer(recipe, text, device, [watch])
        trainer.run()
    return TextModel(trainer.model, text.tokenizer), watch


def story_memories(model: TextModel) -> MemoryCurve:
    """The loss of held-out stories with short and long memories."""
    return measure_memories(model.model, model.tokenizer.encode(held_out_stories()), STORY_MEMORIES)


def continuation(model: TextModel, prompt: str, count: int, *, temperature: float = 0.7) -> Iterator[str]:
    """Generated text after a prompt, piece by piece."""
    return model.stream(model.session(prompt), count, Sampling(temperature=temperature, top_p=0.95))
