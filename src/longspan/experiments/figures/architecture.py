"""The architecture diagram of the README: segments of Transformer-XL and the memory between them.

python -m longspan.experiments.figures.architecture docs/images
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.experiments.figures.drawing import make_folder, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYERS = 3
TOKENS = 4  # per segment
MEMORY = 4  # cached positions per layer
INK, GREY, LIGHT, BLUE, ORANGE = "#1a1a1a", "#666666", "#cccccc", "#1f6fb2", "#c2570c"


def draw_architecture(folder: Path) -> None:
    """architecture.svg. The background is opaque white, so that it is readable on a light and on a dark page."""
    with save_figure(folder, "architecture", 7.6, 3.9, kinds=("svg",)) as figure:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_xlim(-2.6, 12.2)
        axes.set_ylim(-1.7, LAYERS + 1.15)
        # Positions 0 to 3 are the memory of the current segment, and the segment before it; 5 to 8 the current segment.
        memory, segment = range(MEMORY), range(MEMORY + 1, MEMORY + 1 + TOKENS)
        _panel(axes, memory, "previous segment: no gradient", GREY)
        _panel(axes, segment, "current segment", BLUE)
        # Every layer caches its inputs: the embedding and all outputs but the last.
        _nodes(axes, [(x, level) for x in memory for level in range(LAYERS)], ORANGE)
        _nodes(axes, [(x, LAYERS) for x in memory], "white")
        _nodes(axes, [(x, level) for x in segment for level in range(LAYERS + 1)], BLUE)
        _attention(axes, memory, segment)
        _labels(axes, memory, segment)


def _panel(axes: "Axes", columns: range, title: str, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner, width = (columns[0] - 0.5, -0.45), columns[-1] - columns[0] + 1.0
    style: Any = {"boxstyle": "round,pad=0.1,rounding_size=0.2", "linewidth": 1, "edgecolor": colour}
    axes.add_patch(FancyBboxPatch(corner, width, LAYERS + 0.9, facecolor=colour, alpha=0.08, **style))
    axes.text(sum(columns) / len(columns), LAYERS + 0.78, title, ha="center", color=colour, fontsize=9)


def _nodes(axes: "Axes", points: list[tuple[int, int]], colour: str) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(x, y, "o", markersize=11, color=colour, markeredgecolor=INK, markeredgewidth=0.8, zorder=3)


def _attention(axes: "Axes", memory: range, segment: range) -> None:
    """Lines from the keys of every layer to its queries; those of the last query are highlighted."""
    from matplotlib.collections import LineCollection

    last = segment[-1]
    pairs = [(key, query) for query in segment for key in (*memory, *segment) if key <= query]
    groups = {
        LIGHT: [pair for pair in pairs if pair[1] != last],
        ORANGE: [pair for pair in pairs if pair[1] == last and pair[0] in memory],
        BLUE: [pair for pair in pairs if pair[1] == last and pair[0] not in memory],
    }
    for colour, group in groups.items():
        lines = [[(key, level), (query, level + 1)] for key, query in group for level in range(LAYERS)]
        width, order = (0.5, 1) if colour == LIGHT else (1.2, 2)
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, zorder=order, clip_on=False))


def _labels(axes: "Axes", memory: range, segment: range) -> None:
    names = ["embedding", *(f"layer {n}" for n in range(1, LAYERS + 1))]
    for level, name in enumerate(names):
        axes.text(memory[0] - 0.95, level, name, ha="right", va="center", color=INK, fontsize=9)
    for k, x in enumerate((*memory, *segment)):
        axes.text(x, -0.85, f"$x_{{{k + 1}}}$", ha="center", va="center", color=INK, fontsize=10)
    axes.text(segment[-1] + 0.95, LAYERS, "softmax:\nnext token", va="center", color=INK, fontsize=9)
    for y, colour, text in (
        (1.75, ORANGE, "memory: inputs\nof each layer"),
        (0.55, BLUE, "attention within\nthe segment"),
    ):
        axes.plot(segment[-1] + 1.1, y, "o", markersize=8, color=colour, markeredgecolor=INK, markeredgewidth=0.8)
        axes.text(segment[-1] + 1.45, y, text, va="center", color=INK, fontsize=9)
    caption = "Each layer sees one memory further back: with N layers and M cached positions, about N × M tokens."
    axes.text((memory[0] + segment[-1]) / 2 + 0.4, -1.5, caption, ha="center", va="center", color=INK, fontsize=9)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m longspan.experiments.figures.architecture FOLDER")
    folder = Path(sys.argv[1])
    make_folder(folder)
    draw_architecture(folder)
    print(folder / "architecture.svg")


if __name__ == "__main__":
    main()
