"""Figures 5, 6 and 7 of Dai et al. 2019 and the spans of heads, for any model whose attention can be looked at."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longspan.analysis.attention import AttentionByDistance
from longspan.analysis.drawing import literal, picture
from longspan.analysis.passages import Passage, label, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

TITLES = {
    "a": "(a) content: query . key",
    "b": "(b) content-dependent position: query . distance",
    "c": "(c) global content: u . key",
    "d": "(d) global position: w . distance",
}
DISTANCE = "distance (tokens back)"
_COLUMNS = 96  # characters in a line of text that is read along
_ADVANCE = 0.60205  # width of a letter of DejaVu Sans Mono over its size
_WIDTH, _MARGIN = 9.6, 0.6  # inches, of a page with text


def draw_attention(found: AttentionByDistance, folder: Path) -> None:
    """figure5: mean attention of every head over distance; a row is a head."""
    rows = found.attention.shape[0] * found.attention.shape[1]
    with picture(folder, "figure5", 6.8, _height(rows)) as figure:
        axes = figure.subplots()
        image = _heads_by_distance(axes, found.attention)
        axes.set_title(f"mean attention over {found.queries:,} queries")
        figure.colorbar(image, ax=axes, label="mean attention (log scale)")


def draw_terms(found: AttentionByDistance, folder: Path) -> None:
    """figure7: the terms of the score, each softmaxed over the memory alone and averaged; a row is a head."""
    rows = found.attention.shape[0] * found.attention.shape[1]
    with picture(folder, "figure7", 9.6, 2 * _height(rows)) as figure:
        panels = figure.subplots(2, 2, sharex=True, sharey=True).flatten()
        low = min(float(_floor(term)) for term in found.terms.values())
        high = max(float(term.max()) for term in found.terms.values())
        for axes, (name, term) in zip(panels, found.terms.items(), strict=True):
            image = _heads_by_distance(axes, term, low, high)
            axes.set_title(TITLES[name])
            axes.label_outer()
        figure.colorbar(image, ax=list(panels), label="mean of the term's softmax (log scale)")


def draw_spans(found: AttentionByDistance, folder: Path) -> None:
    """spans: for every head, how many tokens back half and nine tenths of its attention lie."""
    from matplotlib.ticker import LogLocator

    layers, heads, _ = found.attention.shape
    half, most = found.spans(0.5).flatten(), found.spans(0.9).flatten()
    rows = np.arange(layers * heads)
    with picture(folder, "spans", 6.4, max(2.4, 1.2 + 0.16 * len(rows))) as figure:
        axes = figure.subplots()
        axes.hlines(rows, half, most, color="#999999", linewidth=1)
        axes.plot(half, rows, "o", color="black", markerfacecolor="white", label="50% of its attention")
        axes.plot(most, rows, "s", color="black", label="90% of its attention")
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("span (tokens back within which it lies)")
        _name_rows(axes, layers, heads)
        figure.legend(loc="outside upper left", ncols=2, fontsize=8)


def draw_wide_head(passage: Passage, layer: int, head: int, name: str, folder: Path, share: float = 0.2) -> None:
    """figure6: one head; rows are targets, the memory tokens with the largest attention are black, text below.

    The text is what the last target had before it, the same tokens marked.
    """
    weights = passage.attention[layer, head]
    marks = top_share(weights, passage.seen, share)
    lines = lay_out(passage.memory_of(-1), marks[-1, : passage.seen[-1]][::-1], _COLUMNS)
    map_height, text_height = 0.15 * len(weights) + 0.2, 0.17 * (len(lines) + 2)
    height = map_height + text_height + 1.2
    with picture(folder, name, _WIDTH, height) as figure:
        # Placed by hand: the text's letters are as wide as its columns only where the width is known.
        figure.set_layout_engine("none")
        text = figure.add_axes((_MARGIN / _WIDTH, 0.1 / height, 1 - 2 * _MARGIN / _WIDTH, text_height / height))
        axes = figure.add_axes(
            (_MARGIN / _WIDTH, (text_height + 0.85) / height, 1 - 2 * _MARGIN / _WIDTH, map_height / height)
        )
        beyond = np.arange(marks.shape[1]) >= passage.seen[:, None]
        axes.imshow(np.where(beyond, 0.15, marks), cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_yticks(range(len(weights)), [literal(label(target)) for target in passage.targets])
        axes.tick_params(axis="y", labelsize=7, labelfontfamily="monospace")
        axes.set_xlabel(
            f"{DISTANCE}; black: the {share:.0%} of what the target sees with the largest attention; grey: out of sight"
        )
        axes.set_ylabel("target (next token)")
        axes.set_title(f"layer {layer + 1}, head {head + 1}")
        _write_text(text, lines, label(passage.targets[-1]))


def widest_heads(found: AttentionByDistance, count: int = 3) -> list[tuple[int, int]]:
    """Layer and head of those that look farthest back on average, the widest first."""
    far = found.mean_distances()
    order = np.argsort(-far, axis=None, kind="stable")[:count]
    return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, far.shape), strict=True)]


def top_share(weights: NDArray[np.floating], seen: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """For each row the share of its first `seen` columns with the largest weight, at least one."""
    marks = np.zeros(weights.shape, bool)
    for row, count in enumerate(seen):
        chosen = np.argsort(-weights[row, :count], kind="stable")[: max(1, round(share * count))]
        marks[row, chosen] = True
    return marks


def _height(rows: int) -> float:
    return min(14.0, max(2.6, 1.2 + 0.09 * rows))


def _floor(values: NDArray[np.float64]) -> float:
    """The least that is drawn apart: a tenth of an even share is white, an even share light grey."""
    return 0.1 / values.shape[-1]


def _heads_by_distance(
    axes: "Axes", values: NDArray[np.float64], low: float | None = None, high: float | None = None
) -> "AxesImage":
    from matplotlib.colors import LogNorm

    layers, heads, distances = values.shape
    low = _floor(values) if low is None else low
    norm = LogNorm(low, max(high if high is not None else float(values.max()), 10 * low))
    image = axes.imshow(
        np.maximum(values.reshape(-1, distances), low),
        cmap="Greys",
        norm=norm,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, distances - 0.5, layers * heads - 0.5, -0.5),
    )
    axes.set_xlabel(DISTANCE)
    _name_rows(axes, layers, heads)
    return image


def _name_rows(axes: "Axes", layers: int, heads: int) -> None:
    """A row for each head, from the first layer down, layers ruled off and named."""
    every = -(-layers // 24)
    named = range(0, layers, every)
    axes.set_yticks([(n + 0.5) * heads - 0.5 for n in named], [f"layer {n + 1}" for n in named])
    for n in range(1, layers):
        axes.axhline(n * heads - 0.5, color="black", linewidth=0.4)
    axes.set_ylim(layers * heads - 0.5, -0.5)
    axes.set_ylabel(f"head ({heads} in each layer)")


def _write_text(axes: "Axes", lines: list[list[tuple[str, bool]]], target: str) -> None:
    """Text in even columns; marked stretches are white on black, the target stands in a frame."""
    axes.set_axis_off()
    cells = np.zeros((len(lines) + 2, _COLUMNS), bool)
    font: Any = {
        "family": "DejaVu Sans Mono",
        "fontsize": (_WIDTH - 2 * _MARGIN) * 72 / _COLUMNS / _ADVANCE,
        "va": "center",
    }
    for row, line in enumerate(lines):
        column = 0
        for stretch, marked in line:
            cells[row, column : column + len(stretch)] = marked
            # A few letters at a time: each placed at its own column, so that roundings of their widths do not add up.
            for k in range(0, len(stretch), 8):
                shown, colour = literal(stretch[k : k + 8]), "white" if marked else "black"
                axes.text(column + k, row + 0.5, shown, color=colour, **font)
            column += len(stretch)
    axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, aspect="auto", extent=(0, _COLUMNS, len(cells), 0))
    axes.set_title("the memory of the last target; white on black where marked, the target in a frame", fontsize=8)
    box = {"facecolor": "white", "edgecolor": "black", "boxstyle": "square,pad=0.3"}
    axes.text(0.5, len(lines) + 1, literal(target), bbox=box, **font)
