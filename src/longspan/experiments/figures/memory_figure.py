"""Loss against memory length: one model, read with shorter and longer memories than it was trained with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspan.checkpoints.model_folder import Loaded
from longspan.contract import LanguageModel
from longspan.data.encoded import Encoded, Excerpt
from longspan.errors import ConfigError
from longspan.experiments.figures.drawing import literal, make_folder, save_figure
from longspan.experiments.figures.model_figures import Stage
from longspan.scoring.contexts import Progress
from longspan.scoring.losses import Ids
from longspan.scoring.score import score


@dataclass(frozen=True)
class MemoryCurve:
    """`bits[k]` is the mean loss in bits per token with `memories[k]` cached positions per layer."""

    memories: tuple[int, ...]
    bits: tuple[float, ...]
    scored: int
    """Tokens scored with each of them."""


def memory_figure(
    loaded: Loaded,
    name: str,
    text: Encoded,
    folder: Path,
    stage: Stage,
    *,
    memories: Sequence[int],
    tokens: int | None = None,
) -> list[Path]:
    """Draw memory.svg in `folder` from the first `tokens` of a text (default: all). Returns its path."""
    make_folder(folder)
    with stage("memories") as watch:
        curve = measure_memories(loaded.model, text.excerpt(0, tokens), memories, progress=watch)
    unit = loaded.tokenizer.unit
    title = f"{literal(name)}: {curve.scored:,} {unit}s of text, the same weights at every point"
    draw_memory(curve, folder, unit=unit, title=title, default=loaded.model.reading.memory)
    return [folder / "memory.svg"]


def measure_memories(
    model: LanguageModel, text: Ids | Excerpt, memories: Sequence[int], *, progress: Progress | None = None
) -> MemoryCurve:
    """Score a text as a stream once per memory length. Other settings are those of the model's reading."""
    if "memory" not in model.settings:
        raise ConfigError(
            f"{type(model).__name__} has no memory length to vary; memories={list(memories)} needs a model with memory"
        )
    lengths, bits, scored = tuple(sorted(set(memories))), [], 0
    for k, memory in enumerate(lengths):
        # A memory of 0 leaves nothing to keep at the same length or to point to.
        off: dict[str, Any] = {} if memory else {"same_length": False, "pointer": 0}

        def advance(done: int, total: int, k: int = k) -> None:
            if progress is not None:
                progress(k * total + done, len(lengths) * total)

        found = score(model, text, replace(model.reading, memory=memory, **off), method="stream", progress=advance)
        bits.append(found.bits)
        scored = found.scored
    return MemoryCurve(lengths, tuple(bits), scored)


def draw_memory(curve: MemoryCurve, folder: Path, *, unit: str, title: str, default: int | None = None) -> None:
    """memory.svg and memory.pdf: the curve with its values, memory lengths evenly spaced. `default` marks the length of
    the model.

    The background is opaque white, so that the figure is readable on a light and on a dark page.
    """
    with save_figure(folder, "memory", 6.4, 3.2, kinds=("svg", "pdf")) as figure:
        axes = figure.subplots()
        places = range(len(curve.memories))
        axes.plot(places, curve.bits, "-o", color="#1f6fb2")
        for place, (memory, bits) in enumerate(zip(curve.memories, curve.bits, strict=True)):
            axes.annotate(f"{bits:.3f}", (place, bits), (3, 6), textcoords="offset points", fontsize=8)
            if memory == default:
                axes.plot(place, bits, "o", color="#c2570c", markersize=7, label="memory length of the model")
                axes.legend(loc="upper right")
        axes.set_xticks(places, [f"{memory:,}" for memory in curve.memories])
        axes.margins(y=0.15)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"memory length ({unit}s cached per layer)")
        axes.set_ylabel(f"loss (bits per {unit})")
        axes.set_title(title)
