"""The figure of a scaling study: losses against parameters, and losses at equal compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longspan.experiments.figures.drawing import legend_name, line_style, save_figure
from longspan.experiments.scaling.law import Floats
from longspan.experiments.scaling.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"non_embedding": "parameters without embeddings, N", "parameters": "parameters, N"}
BUDGETS = 5


def draw_studies(found: Sequence[Study], folder: Path) -> list[Path]:
    """scaling.png, .svg and .pdf in `folder`: one row per group, measured losses on the left, isoFLOP curves on the
    right."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    with save_figure(folder, "scaling", 9.5, 3.2 * len(found)) as figure:
        rows = figure.subplots(len(found), 2, squeeze=False, sharex=True, sharey=True)
        for one, (left, right) in zip(found, rows, strict=True):
            sizes = _sizes(one)
            _draw_tokens(left, one, sizes)
            _draw_compute(right, one, sizes)
            left.set_ylabel("validation loss (bits per token)")
            left.set_title(f"{legend_name(one.group)}: lines of equal tokens")
            right.set_title("lines of equal compute, C = 6 N D; stars: best N")
        for axes in rows[-1]:
            axes.set_xlabel(NAMES[found[0].count])
            low, high = axes.get_xlim()
            if high > 20 * low:
                axes.xaxis.set_minor_formatter(NullFormatter())
            else:  # there may be only one power of ten
                axes.xaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
                axes.xaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(9, 9)))
    return [folder / f"scaling.{kind}" for kind in ("png", "svg", "pdf")]


def _sizes(one: Study) -> Floats:
    counts = [getattr(point, one.count) for point in one.points]
    return np.geomspace(min(counts), max(counts), 100)


def _draw_tokens(axes: "Axes", one: Study, sizes: Floats) -> None:
    """Points are runs, lines are the law."""
    for k, tokens in enumerate(sorted({point.tokens for point in one.points})):
        style = line_style(k)
        runs = [point for point in one.points if point.tokens == tokens]
        axes.plot(sizes, one.law.loss(sizes, tokens), color=style["color"], linestyle=style["linestyle"], linewidth=0.9)
        places, bits = [getattr(point, one.count) for point in runs], [point.bits for point in runs]
        axes.plot(places, bits, style["marker"], color=style["color"], label=f"D = {tokens / 1e6:.3g}M")
    axes.set_xscale("log")
    _legend(axes)


def _draw_compute(axes: "Axes", one: Study, sizes: Floats) -> None:
    """The law at equal compute with its minima, and each model's losses, interpolated to that compute."""
    compute = [6.0 * getattr(point, one.count) * point.tokens for point in one.points]
    measured = [point.tokens for point in one.points]
    shown = (min(measured) / 1.5, max(measured) * 1.5)  # the law is not drawn far outside of the runs
    for k, budget in enumerate(np.geomspace(np.quantile(compute, 0.1), np.quantile(compute, 0.9), BUDGETS)):
        style = line_style(k)
        tokens = budget / (6 * sizes)
        inside = (tokens >= shown[0]) & (tokens <= shown[1])
        label = f"C = {budget:.2g}"
        axes.plot(sizes[inside], one.law.loss(sizes, tokens)[inside], color=style["color"], linewidth=0.9, label=label)
        best = one.law.best_parameters(budget)
        if sizes[0] <= best <= sizes[-1] and shown[0] <= budget / (6 * best) <= shown[1]:
            axes.plot(best, one.law.loss(best, budget / (6 * best)), "*", color=style["color"], markersize=9)
        places, bits = at_compute(one, budget)
        axes.plot(places, bits, style["marker"], color=style["color"])
    axes.set_xscale("log")
    _legend(axes)


def _legend(axes: "Axes") -> None:
    """Beside the axes, so that it covers no line."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, fontsize=8, handlelength=1.2)


def at_compute(one: Study, flops: float) -> tuple[list[int], list[float]]:
    """The sizes with runs of less and of more compute than this, and their losses, linear in log D between two runs."""
    models: dict[int, list[tuple[float, float]]] = {}
    for point in one.points:
        models.setdefault(getattr(point, one.count), []).append((np.log(point.tokens), point.bits))
    places, bits = [], []
    for size, runs in sorted(models.items()):
        tokens, losses = zip(*sorted(runs), strict=True)
        wanted = np.log(flops / (6 * size))
        if tokens[0] <= wanted <= tokens[-1]:
            places.append(size)
            bits.append(float(np.interp(wanted, tokens, losses)))
    return places, bits
