"""Figures of runs of several budgets: losses against training time and tokens, and against the memory of evaluation."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.experiments.budget_curves import UNITS, window_label
from longspan.experiments.figures.drawing import (
    LINES,
    legend,
    legend_height,
    legend_name,
    line_style,
    literal,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARK, MARKS = "#9f1239", {"seconds": "min", "tokens": "M"}
"""Colour and units of crossings."""


def draw_budgets(
    lines: Mapping[str, Sequence[Mapping[str, Any]]],
    pairs: Sequence[Mapping[str, Any]],
    folder: Path,
    title: str,
    unit: str,
) -> None:
    """budgets.png, .svg and .pdf: losses of every line against time and against tokens. Circles are crossings."""
    with save_figure(folder, "budgets", 8.0, 3.4 + legend_height(list(lines), 8.0)) as figure:
        axes = dict(zip(UNITS, figure.subplots(1, 2, sharey=True), strict=True))
        for name, scale in UNITS.items():
            for k, (label, points) in enumerate(lines.items()):
                places = [float(point[name]) / scale for point in points]
                axes[name].plot(places, [point["bits"] for point in points], **line_style(k), label=legend_name(label))
            found = [one for pair in pairs if pair["against"] == name for one in pair["crossings"]]
            for k, one in enumerate(sorted(found, key=lambda one: float(one[name]))):
                label = f"{one[name] / scale:.3g} {MARKS[name]}"
                _mark(axes[name], one[name] / scale, one["bits"], label, above=k % 2 == 0)
            axes[name].set_xscale("log")
            _ticks(axes[name], sorted({float(p[name]) / scale for points in lines.values() for p in points}))
            axes[name].grid(color="#dddddd", linewidth=0.6)
            axes[name].margins(x=0.08, y=0.12)
        axes["seconds"].set_xlabel("training time (minutes)")
        axes["tokens"].set_xlabel(f"training text (millions of {unit}s)")
        axes["seconds"].set_ylabel(f"loss (bits per {unit})")
        axes["seconds"].set_title(literal(title))
        legend(figure, axes["seconds"])


def _mark(axes: "Axes", x: float, y: float, label: str, *, above: bool) -> None:
    """A crossing: a circle with a label. Labels of neighbours are on different sides, so that they do not overlap."""
    axes.plot(x, y, "o", markersize=11, markerfacecolor="none", markeredgecolor=MARK, markeredgewidth=1.4)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.6}
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom" if above else "top"}
    axes.annotate(label, (x, y), (0, 9 if above else -9), fontsize=9, color=MARK, bbox=box, **place)


def _ticks(axes: "Axes", values: Sequence[float]) -> None:
    """Label the values of an axis, but none that is close to the one before it."""
    kept = [values[0]]
    for value in values[1:]:
        if math.log(value / kept[-1]) > 0.09 * math.log(max(values[-1] / values[0], 1.01)):
            kept.append(value)
    axes.set_xticks(kept, [f"{value:.3g}" for value in kept])
    axes.set_xticks([], minor=True)


def draw_memories(rows: Sequence[Mapping[str, Any]], folder: Path, title: str, unit: str) -> None:
    """memories.png, .svg and .pdf: the largest run of each curve, its loss against the memory of evaluation, with and
    without the discount. The legend has the lowest loss of each line."""
    largest = {row["curve"]: row for row in sorted(rows, key=lambda row: int(row["steps"]))}
    lines: list[tuple[str, list[Mapping[str, Any]], dict[str, Any]]] = []
    for k, curve in enumerate(dict.fromkeys(row["curve"] for row in rows)):
        style = {name: LINES[k % len(LINES)][name] for name in ("color", "marker")}
        lines += _memory_lines(largest[curve], style)
    memories = sorted({int(one["memory"]) for _, scores, _ in lines for one in scores})
    place = {memory: k for k, memory in enumerate(memories)}
    with save_figure(folder, "memories", 8.0, 3.4 + legend_height([label for label, _, _ in lines], 8.0)) as figure:
        axes = figure.subplots()
        for k, (label, scores, style) in enumerate(lines):
            places, bits = [place[int(one["memory"])] for one in scores], [float(one["bits"]) for one in scores]
            if scores[0]["way"] == "window":
                places, bits = [0, len(memories) - 1], bits * 2
            axes.plot(places, bits, **style, label=legend_name(label), zorder=len(lines) - k + 2)
        axes.set_xticks(range(len(memories)), [f"{memory:,}" for memory in memories])
        axes.margins(y=0.08)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_xlabel(f"memory at evaluation ({unit}s); 0: segments of training, each without earlier text")
        axes.set_ylabel(f"loss (bits per {unit})")
        axes.set_title(literal(title))
        legend(figure, axes)


def _memory_lines(
    row: Mapping[str, Any], style: dict[str, Any]
) -> list[tuple[str, list[Mapping[str, Any]], dict[str, Any]]]:
    """Label, scores and style: with the discount, without it and, for a run without memory, windows."""
    streams = sorted((one for one in row["scores"] if one["way"] != "window"), key=lambda one: int(one["memory"]))
    windows = [one for one in row["scores"] if one["way"] == "window"]
    reduced = {one["memory"] for one in streams if one["discount"]}
    best = [one for one in streams if one["discount"] or one["memory"] not in reduced]
    found = [
        (_lowest(f"{row['curve']}, discount" if reduced else row["curve"], best), best, style | {"linestyle": "-"})
    ]
    if reduced:
        plain = [one for one in streams if not one["discount"]]
        look = {"linestyle": "--", "markerfacecolor": "white"}
        found.append((_lowest(f"{row['curve']}, clamp only", plain), plain, style | look))
    for one in windows:
        label = f"{row['curve']}, {window_label(one)}: {one['bits']:.4f}"
        found.append((label, [one], style | {"linestyle": ":", "marker": ""}))
    return found


def _lowest(label: str, scores: Sequence[Mapping[str, Any]]) -> str:
    best = min(scores, key=lambda one: float(one["bits"]))
    return f"{label}: {best['bits']:.4f} at {best['memory']:,}"
