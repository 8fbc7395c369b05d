"""Figures 5, 6 and 7 of Dai et al. 2019 and the attention spans of heads."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longspan.experiments.figures.attention import AttentionByDistance
from longspan.experiments.figures.attention_sample import AttentionSample, label, wrap
from longspan.experiments.figures.drawing import literal, save_figure

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
_COLUMNS = 96  # characters per line of text
_ADVANCE = 0.60205  # width of a character of DejaVu Sans Mono, relative to the font size
_WIDTH, _MARGIN = 9.6, 0.6  # inches, of a figure with text
_LABEL_SIZE, _LABEL_SPACE = 7, 0.42  # points; inches for the axis title, its padding and the ticks


def draw_attention(means: AttentionByDistance, folder: Path) -> None:
    """figure5: mean attention by distance, one row per head."""
    rows = means.attention.shape[0] * means.attention.shape[1]
    with save_figure(folder, "figure5", 6.8, _height(rows)) as figure:
        axes = figure.subplots()
        image = _heads_by_distance(axes, means.attention)
        axes.set_title(f"mean attention over {means.queries:,} queries")
        figure.colorbar(image, ax=axes, label="mean attention (log scale)")


def draw_terms(means: AttentionByDistance, folder: Path) -> None:
    """figure7: the mean softmax of each term of the score by distance, one row per head."""
    rows = means.attention.shape[0] * means.attention.shape[1]
    with save_figure(folder, "figure7", 9.6, 2 * _height(rows)) as figure:
        panels = figure.subplots(2, 2, sharex=True, sharey=True).flatten()
        low = min(float(_floor(term)) for term in means.terms.values())
        high = max(float(term.max()) for term in means.terms.values())
        for axes, (name, term) in zip(panels, means.terms.items(), strict=True):
            image = _heads_by_distance(axes, term, low, high)
            axes.set_title(TITLES[name])
            axes.label_outer()
        figure.colorbar(image, ax=list(panels), label="mean of the term's softmax (log scale)")


def draw_spans(means: AttentionByDistance, folder: Path) -> None:
    """spans: the number of newest tokens that get 50% and 90% of each head's attention."""
    from matplotlib.ticker import LogLocator

    layers, heads, _ = means.attention.shape
    half, most = means.spans(0.5).flatten(), means.spans(0.9).flatten()
    rows = np.arange(layers * heads)
    with save_figure(folder, "spans", 6.4, max(2.4, 1.2 + 0.16 * len(rows))) as figure:
        axes = figure.subplots()
        axes.hlines(rows, half, most, color="#999999", linewidth=1)
        axes.plot(half, rows, "o", color="black", markerfacecolor="white", label="50% of its attention")
        axes.plot(most, rows, "s", color="black", label="90% of its attention")
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("span (tokens back)")
        _label_rows(axes, layers, heads)
        figure.legend(loc="outside upper left", ncols=2, fontsize=8)


def draw_head(sample: AttentionSample, layer: int, head: int, name: str, folder: Path, share: float = 0.2) -> None:
    """figure6: one head. Rows are targets; the tokens with the largest attention are black.

    Below is the text before the last target, with the same tokens marked.
    """
    weights = sample.attention[layer, head]
    marks = top_share(weights, sample.visible, share)
    lines = wrap(sample.context(-1), marks[-1, : sample.visible[-1]][::-1], _COLUMNS)
    map_height, text_height = 0.15 * len(weights) + 0.2, 0.17 * (len(lines) + 2)
    height = map_height + text_height + 1.2
    with save_figure(folder, name, _WIDTH, height) as figure:
        # Fixed positions: characters fit their columns only if the width of the axes is known.
        figure.set_layout_engine("none")
        below = figure.add_axes((_MARGIN / _WIDTH, 0.1 / height, 1 - 2 * _MARGIN / _WIDTH, text_height / height))
        labels = [label(target) for target in sample.targets]
        left = max(_MARGIN, _LABEL_SPACE + max(map(len, labels)) * _LABEL_SIZE * _ADVANCE / 72)
        axes = figure.add_axes(
            (left / _WIDTH, (text_height + 0.85) / height, 1 - (left + _MARGIN) / _WIDTH, map_height / height)
        )
        beyond = np.arange(marks.shape[1]) >= sample.visible[:, None]
        axes.imshow(np.where(beyond, 0.15, marks), cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_yticks(range(len(weights)), [literal(text) for text in labels])
        axes.tick_params(axis="y", labelsize=_LABEL_SIZE, labelfontfamily="monospace")
        axes.set_xlabel(
            f"{DISTANCE}; black: the {share:.0%} of visible tokens with the largest attention; grey: not visible"
        )
        axes.set_ylabel("target (next token)")
        axes.set_title(f"layer {layer + 1}, head {head + 1}")
        _draw_text(below, lines, label(sample.targets[-1]))


def widest_heads(means: AttentionByDistance, count: int = 3) -> list[tuple[int, int]]:
    """(layer, head) of the heads with the largest mean distance, largest first."""
    distances = means.mean_distances()
    order = np.argsort(-distances, axis=None, kind="stable")[:count]
    return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, distances.shape), strict=True)]


def top_share(weights: NDArray[np.floating], visible: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Marks, in each row, the `share` of its first `visible` columns with the largest weights, at least one."""
    marks = np.zeros(weights.shape, bool)
    for row, count in enumerate(visible):
        chosen = np.argsort(-weights[row, :count], kind="stable")[: max(1, round(share * count))]
        marks[row, chosen] = True
    return marks


def _height(rows: int) -> float:
    return min(14.0, max(2.6, 1.2 + 0.09 * rows))


def _floor(values: NDArray[np.float64]) -> float:
    """The lower end of the scale: a tenth of uniform attention is white, uniform attention light grey."""
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
    _label_rows(axes, layers, heads)
    return image


def _label_rows(axes: "Axes", layers: int, heads: int) -> None:
    """One row per head, the first layer at the top, with a line between layers."""
    labelled = range(0, layers, -(-layers // 24))
    axes.set_yticks([(n + 0.5) * heads - 0.5 for n in labelled], [f"layer {n + 1}" for n in labelled])
    for n in range(1, layers):
        axes.axhline(n * heads - 0.5, color="black", linewidth=0.4)
    axes.set_ylim(layers * heads - 0.5, -0.5)
    axes.set_ylabel(f"head ({heads} in each layer)")


def _draw_text(axes: "Axes", lines: list[list[tuple[str, bool]]], target: str) -> None:
    """Monospaced text. Marked characters are white on black, the target has a frame."""
    axes.set_axis_off()
    cells = np.zeros((len(lines) + 2, _COLUMNS), bool)
    font: Any = {
        "family": "DejaVu Sans Mono",
        "fontsize": (_WIDTH - 2 * _MARGIN) * 72 / _COLUMNS / _ADVANCE,
        "va": "center",
    }
    for row, line in enumerate(lines):
        column = 0
        for part, marked in line:
            cells[row, column : column + len(part)] = marked
            # Eight characters at a time, so that rounding of their widths does not add up.
            for k in range(0, len(part), 8):
                shown, colour = literal(part[k : k + 8]), "white" if marked else "black"
                axes.text(column + k, row + 0.5, shown, color=colour, **font)
            column += len(part)
    axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, aspect="auto", extent=(0, _COLUMNS, len(cells), 0))
    axes.set_title("text before the last target; marked tokens are white on black, the target has a frame", fontsize=8)
    box = {"facecolor": "white", "edgecolor": "black", "boxstyle": "square,pad=0.3"}
    axes.text(0.5, len(lines) + 1, literal(target), bbox=box, **font)
