"""The page of `longspan demo`: two figures, two tables and the samples in one HTML file."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from longspan.checkpoints.store import write_file
from longspan.experiments import demo
from longspan.experiments.demo import Row, Watch
from longspan.experiments.figures.drawing import save_figure
from longspan.experiments.report.page import Section, figure, note, page, table, text

_BAR = 0.28  # inches


def write_page(path: Path, on_page: Sequence[Row], on_stories: Sequence[Row], watch: Watch, seconds: float) -> None:
    """`on_page` and `on_stories` are models and compressors with their bits, and `watch` saw the training."""
    with tempfile.TemporaryDirectory(prefix="longspan-demo-") as scratch:
        folder = Path(scratch)
        sections = [_memory(on_page, folder), _training(on_stories, watch, folder), _samples(watch)]
        lead = f"Made by `longspan demo` in {seconds:.0f} s. Lower bits are better: they are the size of the text."
        content = page("What memory is worth", lead, sections)
    write_file(path, content.encode("utf-8"))


def _memory(rows: Sequence[Row], folder: Path) -> Section:
    size = demo.PAGE.stat().st_size
    draw_bits(rows, folder, "page", f"A page of {size:,} bytes that no model has seen")
    caption = "The bundled model with longer and longer memories, and compressors. Only brotli knows some English."
    body = figure(folder / "page.svg", caption) + _table(rows)
    return Section("The bundled model", body)


def _training(rows: Sequence[Row], watch: Watch, folder: Path) -> Section:
    with save_figure(folder, "curve", 6.4, 2.6, kinds=("svg",)) as canvas:
        axes = canvas.subplots()
        axes.plot(range(1, len(watch.curve) + 1), watch.curve, color="#1f6fb2", label="training text")
        seen = [(moment.step, moment.bits) for moment in watch.moments]
        axes.plot(*zip(*seen, strict=True), "o", color="#c2570c", label="held-out stories")
        axes.set_xlabel("training step")
        axes.set_ylabel("loss (bits per byte)")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")
    draw_bits(rows, folder, "stories", "Stories that are not part of the training text")
    body = figure(folder / "curve.svg", "The loss while the small model learns.")
    return Section("A small model learns", body + figure(folder / "stories.svg", "After training.") + _table(rows))


def _samples(watch: Watch) -> Section:
    parts = [
        note(f"After {moment.step} steps, {moment.bits:.2f} bits per byte:") + text(moment.text)
        for moment in watch.moments
    ]
    return Section("What it writes", "".join(parts))


def _table(rows: Sequence[Row]) -> str:
    return table(["", "bits per byte"], [[row.name, f"{row.bits:.3f}"] for row in rows])


def draw_bits(rows: Sequence[Row], folder: Path, name: str, title: str) -> None:
    """A bar per row, from the top."""
    with save_figure(folder, name, 6.4, 0.9 + _BAR * len(rows), kinds=("svg",)) as canvas:
        axes = canvas.subplots()
        places = range(len(rows), 0, -1)
        colours = ["#1f6fb2" if row.parameters is not None else "#999999" for row in rows]
        axes.barh(places, [row.bits for row in rows], color=colours, height=0.7)
        for place, row in zip(places, rows, strict=True):
            axes.annotate(f"{row.bits:.2f}", (row.bits, place), (4, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [row.name for row in rows])
        axes.margins(x=0.1)
        axes.set_xlabel("bits per byte")
        axes.set_title(title)
